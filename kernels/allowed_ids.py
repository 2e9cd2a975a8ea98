"""Leaves a request only the tokens of its own list: the other logits become -inf. Knows nothing of positions."""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 4096


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
    op = apply_allowed_ids_triton if logits.is_cuda else apply_allowed_ids_torch
    op(logits, row_slots, allowed_mask, num_allowed)


def apply_allowed_ids_torch(
    logits: torch.Tensor, row_slots: torch.Tensor, allowed_mask: torch.Tensor, num_allowed: torch.Tensor
) -> None:
    """Do what `apply_allowed_ids` does, row by row: a request's rows are neighbours and share their mask."""
    vocab = logits.shape[1]
    removed_of: dict[int, torch.Tensor] = {}
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0 or not num_allowed[slot]:
            continue
        if slot not in removed_of:
            bits = np.unpackbits(allowed_mask[slot].numpy().view(np.uint8), count=vocab, bitorder="little")
            removed_of[slot] = torch.from_numpy(bits == 0)
        logits[row].masked_fill_(removed_of[slot], -torch.inf)


@triton.jit
def _allowed_ids_kernel(
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    allowed_mask_ptr,
    allowed_mask_stride,
    num_allowed_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(num_allowed_ptr + slot) == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(allowed_mask_ptr + slot * allowed_mask_stride + token // 32, mask=inside, other=0)
    removed = ((word >> (token % 32)) & 1) == 0
    tl.store(
        logits_ptr + row * logits_stride + token,
        tl.full([BLOCK], float("-inf"), tl.float32),
        mask=inside & removed,
    )


def apply_allowed_ids_triton(
    logits: torch.Tensor, row_slots: torch.Tensor, allowed_mask: torch.Tensor, num_allowed: torch.Tensor
) -> None:
    """Do what `apply_allowed_ids` does, by a (rows x vocabulary blocks) grid."""
    num_rows, vocab = logits.shape
    if logits.numel():
        _allowed_ids_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits,
            logits.stride(0),
            row_slots,
            allowed_mask,
            allowed_mask.stride(0),
            num_allowed,
            vocab,
            BLOCK=_BLOCK,
        )
