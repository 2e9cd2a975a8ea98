"""Removes the tokens that would end a row before it has its least length, exact under speculation.

Knows: the position of each logits row's input token, and from which position on a request may end. That a row's
position counts the drafts before it is all that drafts need. In plain torch: the twin. On the device it is part of the
pass in `sample_tokens.py`.
"""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device


def apply_min_tokens(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    end_mask: torch.Tensor,
    first_end: torch.Tensor,
) -> None:
    """In each row of `logits [N, V] float32` whose sampled token has an index below its slot's `first_end`, the tokens
    whose bit is set for the slot become -inf. In place.

    `row_slots [N] int32` (-1 = padded: untouched), `positions [N] int64` of the input tokens (the sampled one comes a
    position later), `end_mask [R, ceil(V/32)] int32` (bit v % 32 of word v // 32), `first_end [R] int32` = prompt
    tokens + min_tokens (0 = off).
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("positions", positions, torch.int64, logits.shape[0])
    check("first_end", first_end, torch.int32, None)
    check("end_mask", end_mask, torch.int32, first_end.shape[0], -(-logits.shape[1] // 32))
    check_same_device(logits=logits, row_slots=row_slots, positions=positions, end_mask=end_mask, first_end=first_end)
    slots = row_slots.long().clamp(min=0)
    rows = ((row_slots >= 0) & (positions + 1 < first_end[slots])).nonzero().flatten()
    if rows.numel():
        words = end_mask[slots[rows]].view(torch.uint8).numpy()
        of_row, token = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little").nonzero()
        logits[rows[torch.from_numpy(of_row)], torch.from_numpy(token)] = -torch.inf
