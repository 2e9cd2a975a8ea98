"""The soft cap against float64, the kernel against its twin, and the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels.softcap import softcap, softcap_torch, softcap_triton

Subsets = Callable[[int], Iterator[torch.Tensor]]


def make_logits(num_rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 40


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_the_formula(kernel_device: str, cap: float) -> None:
    logits = make_logits(7, 4099)
    logits[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    want = (cap * torch.tanh(logits.double() / cap)).float()
    for op, device in ((softcap_torch, "cpu"), (softcap_triton, kernel_device)):
        got = op(logits.to(device, copy=True), cap).cpu()
        torch.testing.assert_close(got, want, rtol=0, atol=4e-7 * cap, equal_nan=True)  # a few roundings near 1


def test_rows_are_independent(row_subsets: Subsets, threads: int) -> None:
    logits = make_logits(120, 1003)
    whole = softcap(logits.clone(), 30.0)
    for rows in row_subsets(120):
        assert torch.equal(softcap(logits[rows], 30.0), whole[rows])


def test_a_cap_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="cap"):
        softcap(make_logits(1, 5), 0.0)
