"""Min tokens: by hand, against transformers, the law."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from specgen.kernels.min_tokens import apply_min_tokens
from specgen.kernels.penalties import id_mask_of

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(num_rows: int, vocab: int) -> tuple[Call, list[list[int]]]:
    """A third of the slots off (over a mask of poison), a few rows padded; the ids of the masks too."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    num_slots = num_rows // 2 + 2
    slots = torch.randint(0, num_slots, (num_rows,), generator=generator).int()
    slots[3::8] = -1
    slots[0] = 1
    lists = [torch.randperm(vocab, generator=generator)[:3].tolist() for _ in range(num_slots)]
    mask = torch.from_numpy(np.stack([id_mask_of(ids, vocab) for ids in lists]))
    first_end = torch.randint(8, 13, (num_slots,), generator=generator).int()
    first_end[::3] = 0
    positions = torch.randint(5, 14, (num_rows,), generator=generator)
    positions[0] = 5
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[::4, ::3] = -math.inf
    return (logits, slots, positions, mask, first_end), lists


def test_by_hand() -> None:
    """A prompt of 4 tokens and min_tokens 2: the tokens at index 4 and 5 must not end the row."""
    logits = torch.zeros(6, 40)
    mask = torch.from_numpy(np.stack([id_mask_of([0, 33], 40)] * 2))
    slots, positions = torch.tensor([0, 0, 0, 0, 1, -1]).int(), torch.tensor([3, 4, 5, 6, 3, 3])
    apply_min_tokens(logits, slots, positions, mask, torch.tensor([6, 0]).int())
    assert [(row == -math.inf).nonzero().flatten().tolist() for row in logits] == [[0, 33]] * 2 + [[]] * 4


def test_is_transformers() -> None:
    (logits, slots, positions, mask, first_end), lists = make(60, 101)
    wanted = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and first_end[slot]:
            processor = MinNewTokensLengthLogitsProcessor(4, int(first_end[slot]) - 4, lists[slot])
            wanted[row] = processor(torch.zeros(1, int(positions[row]) + 1).long(), wanted[row : row + 1])[0]
    assert not torch.equal(logits, wanted)
    apply_min_tokens(logits, slots, positions, mask, first_end)
    assert torch.equal(logits, wanted)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    (logits, slots, positions, *tables), _ = make(301, 523)
    whole = logits.clone()
    apply_min_tokens(whole, slots, positions, *tables)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_min_tokens(part, slots[rows], positions[rows], *tables)
        assert torch.equal(part, whole[rows])


def test_no_rows() -> None:
    call, _ = make(4, 40)
    apply_min_tokens(*(x[:0] for x in call[:3]), *call[3:])


def test_wrong_arguments_are_refused() -> None:
    (logits, slots, positions, mask, first_end), _ = make(4, 40)
    for bad in (
        (logits, slots, positions.int(), mask, first_end),
        (logits, slots, positions, mask[:, :1], first_end),
        (logits, slots, positions[1:], mask, first_end),
    ):
        with pytest.raises(ValueError):
            apply_min_tokens(*bad)
