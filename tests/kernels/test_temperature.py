"""Temperature: the quotient, what stays untouched, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels.temperature import apply_temperature


def test_rows_are_divided_and_greedy_and_padded_rows_stay() -> None:
    logits = torch.tensor([[1.0, -3.0, -torch.inf]] * 4)
    apply_temperature(logits, torch.tensor([0, 1, -1, 2], dtype=torch.int32), torch.tensor([0.5, 0.0, 1.0]))
    assert logits.tolist() == [[2, -6, -torch.inf], [1, -3, -torch.inf], [1, -3, -torch.inf], [1, -3, -torch.inf]]


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
