"""Allowed ids: by hand, against transformers, the law."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from specgen.kernels.allowed_ids import apply_allowed_ids
from specgen.kernels.penalties import id_mask_of

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(num_rows: int, vocab: int) -> tuple[Call, list[list[int]]]:
    """A third of the slots without a list (over a mask of poison), a few rows padded; the lists too."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    num_slots = num_rows // 2 + 2
    slots = torch.randint(0, num_slots, (num_rows,), generator=generator).int()
    slots[3::8] = -1
    slots[0] = 1
    lists = [torch.randperm(vocab, generator=generator)[: 1 + vocab // 3].tolist() for _ in range(num_slots)]
    mask = torch.from_numpy(np.stack([id_mask_of(ids, vocab) for ids in lists]))
    count = torch.full((num_slots,), len(lists[0]), dtype=torch.int32)
    count[::3] = 0
    lists[::3] = [[]] * len(lists[::3])
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[::4, ::3] = -math.inf
    return (logits, slots, mask, count), lists


def test_by_hand() -> None:
    logits = torch.arange(40.0).repeat(3, 1)
    mask = torch.from_numpy(np.stack([id_mask_of([0, 31, 32, 39], 40), id_mask_of([], 40)]))
    apply_allowed_ids(logits, torch.tensor([0, 1, -1]).int(), mask, torch.tensor([4, 0]).int())
    assert [(i, x) for i, x in enumerate(logits[0].tolist()) if x > -math.inf] == [(i, i) for i in (0, 31, 32, 39)]
    assert torch.equal(logits[1:], torch.arange(40.0).repeat(2, 1))


def test_is_transformers() -> None:
    (logits, slots, mask, count), lists = make(24, 101)
    wanted = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and lists[slot]:
            processor = PrefixConstrainedLogitsProcessor(lambda batch, ids, allowed=lists[slot]: allowed, 1)
            wanted[row : row + 1] = processor(torch.zeros(1, 1).long(), wanted[row : row + 1])
    apply_allowed_ids(logits, slots, mask, count)
    assert torch.equal(logits, wanted)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    (logits, slots, mask, count), _ = make(301, 523)
    whole = logits.clone()
    apply_allowed_ids(whole, slots, mask, count)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_allowed_ids(part, slots[rows], mask, count)
        assert torch.equal(part, whole[rows])


def test_no_rows() -> None:
    call, _ = make(4, 40)
    apply_allowed_ids(*(x[:0] for x in call[:2]), *call[2:])


def test_wrong_arguments_are_refused() -> None:
    (logits, slots, mask, count), _ = make(4, 40)
    for bad in (
        (logits, slots, mask[:, :1], count),
        (logits, slots.long(), mask, count),
        (logits, slots, mask, count[1:]),
    ):
        with pytest.raises(ValueError):
            apply_allowed_ids(*bad)
