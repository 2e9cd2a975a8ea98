"""Typical-p: transformers' warper in float64, ties, the law. On the device it is in `test_filter_rows.py`."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from specgen.kernels.typical_p import apply_typical_p

Subsets = Callable[[int], Iterator[torch.Tensor]]


def make_inputs(num_rows: int, vocab: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, row_slots (a few padded) and p by slot (a few off)."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * scale
    logits[1::4][torch.rand(logits[1::4].shape, generator=generator) < 0.7] = -torch.inf
    slots = torch.randperm(num_rows, generator=generator).int()
    typical_p = torch.rand(num_rows, generator=generator) * 0.98 + 0.01
    typical_p[::6] = 1.0
    slots[3::9] = -1
    return logits, slots, typical_p


@pytest.mark.parametrize(("vocab", "scale"), [(37, 3.0), (1000, 1.0), (5001, 6.0)])
def test_transformers(vocab: int, scale: float) -> None:
    logits, slots, typical_p = make_inputs(60, vocab, scale)
    got = logits.clone()
    apply_typical_p(got, slots, typical_p)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0 or typical_p[slot] == 1:
            assert torch.equal(got[row], logits[row])
            continue
        want = TypicalLogitsWarper(float(typical_p[slot]))(None, logits[row : row + 1].double())[0].float()
        assert torch.equal(got[row], want), row


def test_equals_stay_or_go_together_and_one_stays() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -torch.inf], [5.0, 0.0, 0.0, 0.0], [torch.nan, 2.0, -torch.inf, 1.9]])
    logits = torch.cat([logits, torch.tensor([[-torch.inf] * 4, [torch.nan] * 4])])
    apply_typical_p(logits, torch.arange(5, dtype=torch.int32), torch.tensor([0.1, 0.01, 0.5, 0.5, 0.5]))
    assert logits[0].tolist() == [1.0, 1.0, 1.0, -torch.inf]
    assert logits[1].tolist() == [5.0, -torch.inf, -torch.inf, -torch.inf]
    assert logits[2, 0] == -torch.inf and bool((logits[2] > -torch.inf).any())
    assert logits[3:].tolist() == [[-torch.inf] * 4] * 2  # nothing to keep


def test_rows_are_independent(row_subsets: Subsets, threads: int) -> None:
    logits, slots, typical_p = make_inputs(150, 999)
    whole = logits.clone()
    apply_typical_p(whole, slots, typical_p)
    for rows in row_subsets(150):
        part = logits[rows]
        apply_typical_p(part, slots[rows], typical_p)
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("nothing", [float("-inf"), float("nan")])
def test_a_row_of_nothing_stays_nothing(nothing: float) -> None:
    logits = torch.full((2, 40), nothing)
    logits[1] = torch.linspace(-3, 3, 40)
    apply_typical_p(logits, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0.5, 1.0]))
    assert not logits[0].isfinite().any()
    assert torch.equal(logits[1], torch.linspace(-3, 3, 40))
