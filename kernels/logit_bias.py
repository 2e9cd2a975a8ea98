"""Adds a request's own biases to the logits of a few tokens. Knows nothing of positions or drafts."""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 256


def apply_logit_bias(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
) -> None:
    """`bias_values[slot, i]` is added to token `bias_ids[slot, i]` of each row of `logits [N, V] float32`, for the
    first `num_biases[slot]` entries. In place.

    `row_slots [N] int32` (-1 = padded: untouched), `bias_ids [R, M] int32` (different ids within a slot's entries;
    those outside the vocabulary are skipped), `bias_values [R, M] float32`, `num_biases [R] int32`. A logit of -inf
    stays -inf, NaN stays NaN.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("bias_ids", bias_ids, torch.int32, None, None)
    check("bias_values", bias_values, torch.float32, *bias_ids.shape)
    check("num_biases", num_biases, torch.int32, bias_ids.shape[0])
    check_same_device(
        logits=logits, row_slots=row_slots, bias_ids=bias_ids, bias_values=bias_values, num_biases=num_biases
    )
    op = apply_logit_bias_triton if logits.is_cuda else apply_logit_bias_torch
    op(logits, row_slots, bias_ids, bias_values, num_biases)


def apply_logit_bias_torch(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
) -> None:
    """Do what `apply_logit_bias` does, by torch operations."""
    slots = row_slots.long().clamp(min=0)
    count = torch.where(row_slots >= 0, num_biases[slots], 0)
    if not bool(count.any()):
        return
    row, nth = (torch.arange(int(count.max())) < count[:, None]).nonzero(as_tuple=True)
    token, bias = bias_ids[slots[row], nth].long(), bias_values[slots[row], nth]
    known = token < logits.shape[1]
    logits[row[known], token[known]] += bias[known]


@triton.jit
def _logit_bias_kernel(
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    bias_ids_ptr,
    bias_ids_stride,
    bias_values_ptr,
    bias_values_stride,
    num_biases_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(num_biases_ptr + slot)
    nth = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK >= count:
        return
    mask = nth < count
    token = tl.load(bias_ids_ptr + slot * bias_ids_stride + nth, mask=mask, other=0)
    bias = tl.load(bias_values_ptr + slot * bias_values_stride + nth, mask=mask, other=0.0)
    mask = mask & (token < vocab_size)
    at = logits_ptr + row * logits_stride + token
    tl.store(at, tl.load(at, mask=mask, other=0.0) + bias, mask=mask)


def apply_logit_bias_triton(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
) -> None:
    """Do what `apply_logit_bias` does, by a (rows x blocks of entries) grid."""
    if not logits.numel() or not bias_ids.shape[1]:
        return
    _logit_bias_kernel[(logits.shape[0], triton.cdiv(bias_ids.shape[1], _BLOCK))](
        logits,
        logits.stride(0),
        row_slots,
        bias_ids,
        bias_ids.stride(0),
        bias_values,
        bias_values.stride(0),
        num_biases,
        logits.shape[1],
        BLOCK=_BLOCK,
    )
