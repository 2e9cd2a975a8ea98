"""Leaves a request only the tokens of its own list: the other logits become -inf. Knows nothing of positions.

In plain torch: the twin. On the device it is part of the pass in `sample_tokens.py`.
"""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device


def apply_allowed_ids(
    logits: torch.Tensor, row_slots: torch.Tensor, allowed_mask: torch.Tensor, num_allowed: torch.Tensor
) -> None:
    """Each row of `logits [N, V] float32` keeps the tokens whose bit is set for its slot; the rest is -inf. In place.

    `row_slots [N] int32` (-1 = padded), `allowed_mask [R, ceil(V/32)] int32` (bit v % 32 of word v // 32),
    `num_allowed [R] int32` (0 = every token). Rows without a list, and padded rows, are untouched; so is an allowed
    logit, NaN included.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("num_allowed", num_allowed, torch.int32, None)
    check("allowed_mask", allowed_mask, torch.int32, num_allowed.shape[0], -(-logits.shape[1] // 32))
    check_same_device(logits=logits, row_slots=row_slots, allowed_mask=allowed_mask, num_allowed=num_allowed)
    vocab = logits.shape[1]
    removed_of: dict[int, torch.Tensor] = {}
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0 or not num_allowed[slot]:
            continue
        if slot not in removed_of:
            bits = np.unpackbits(allowed_mask[slot].numpy().view(np.uint8), count=vocab, bitorder="little")
            removed_of[slot] = torch.from_numpy(bits == 0)
        logits[row].masked_fill_(removed_of[slot], -torch.inf)
