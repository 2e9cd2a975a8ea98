"""Temperature: the quotient, what stays untouched, kernel against twin, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels.temperature import apply_temperature, apply_temperature_torch, apply_temperature_triton


def test_rows_are_divided_and_greedy_and_padded_rows_stay() -> None:
    logits = torch.tensor([[1.0, -3.0, -torch.inf]] * 4)
    apply_temperature(logits, torch.tensor([0, 1, -1, 2], dtype=torch.int32), torch.tensor([0.5, 0.0, 1.0]))
    assert logits.tolist() == [[2, -6, -torch.inf], [1, -3, -torch.inf], [1, -3, -torch.inf], [1, -3, -torch.inf]]


@pytest.mark.parametrize(("num_rows", "vocab"), [(7, 5003), (1, 3), (2, 151_936)])
def test_kernel_is_the_twin(kernel_device: str, num_rows: int, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits, temperature = torch.randn(num_rows, vocab) * 5, torch.rand(num_rows + 2) + 0.1
    temperature[1] = 0
    slots = torch.arange(num_rows).int() + 1
    slots[-1] = -1 if num_rows > 2 else 2
    got = logits.to(kernel_device)
    apply_temperature_triton(got, slots.to(kernel_device), temperature.to(kernel_device))
    apply_temperature_torch(logits, slots, temperature)
    assert torch.equal(got.cpu(), logits)


def test_kernel_with_far_rows(kernel_device: str, far_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits, slots, temperature = torch.randn(3, 517), torch.arange(3).int(), torch.tensor([0.3, 0.7, 1.3])
    far = far_rows(logits)
    apply_temperature_triton(far, slots.to(kernel_device), temperature.to(kernel_device))
    apply_temperature_torch(logits, slots, temperature)
    assert torch.equal(far.cpu(), logits)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    logits, temperature, slots = torch.randn(301, 523), torch.rand(301) + 0.1, torch.randperm(301).int()
    whole = logits.clone()
    apply_temperature(whole, slots, temperature)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_temperature(part, slots[rows], temperature)
        assert torch.equal(part, whole[rows])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature: expected dtype"):
        apply_temperature(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.float64))
