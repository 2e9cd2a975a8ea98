"""Removes the tokens that would end a row before it has its least length, exact under speculation.

Knows: the position of each logits row's input token, and from which position on a request may end. That a row's
position counts the drafts before it is all that drafts need.
"""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 4096


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
    op = apply_min_tokens_triton if logits.is_cuda else apply_min_tokens_torch
    op(logits, row_slots, positions, end_mask, first_end)


def apply_min_tokens_torch(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    end_mask: torch.Tensor,
    first_end: torch.Tensor,
) -> None:
    """Do what `apply_min_tokens` does, by torch operations."""
    slots = row_slots.long().clamp(min=0)
    rows = ((row_slots >= 0) & (positions + 1 < first_end[slots])).nonzero().flatten()
    if rows.numel():
        words = end_mask[slots[rows]].view(torch.uint8).numpy()
        of_row, token = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little").nonzero()
        logits[rows[torch.from_numpy(of_row)], torch.from_numpy(token)] = -torch.inf


@triton.jit
def _min_tokens_kernel(
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    positions_ptr,
    end_mask_ptr,
    end_mask_stride,
    first_end_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(positions_ptr + row) + 1 >= tl.load(first_end_ptr + slot):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(end_mask_ptr + slot * end_mask_stride + token // 32, mask=inside, other=0)
    removed = ((word >> (token % 32)) & 1) != 0
    gone = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + token, gone, mask=inside & removed)


def apply_min_tokens_triton(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    end_mask: torch.Tensor,
    first_end: torch.Tensor,
) -> None:
    """Do what `apply_min_tokens` does, by a (rows x vocabulary blocks) grid."""
    num_rows, vocab = logits.shape
    if logits.numel():
        _min_tokens_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits,
            logits.stride(0),
            row_slots,
            positions,
            end_mask,
            end_mask.stride(0),
            first_end,
            vocab,
            BLOCK=_BLOCK,
        )
