"""What a draft layer's projection reads: the norm of a token's embedding beside the norm of a hidden state.

It knows tokens and rows, not whose they are. One pass in place of a lookup, two norms and a copy.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import pdl, tl, triton, wait_for_inputs
from specgen.kernels.rms_norm import normalised, rms_norm_torch


def draft_layer_inputs(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    previous: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    hidden_first: bool,
    mask_first: bool,
) -> torch.Tensor:
    """Return [norm(embedding[input_ids]), norm(previous)], the other way round if `hidden_first`: [T, 2 H], contiguous.

    input_ids, positions: [T] int64, ids below 0 read row 0; embedding: [V, H], contiguous; previous: [T, H], rows may
    be strided; embedding_norm, hidden_norm: [H]; all but the first two of one dtype. `mask_first`: embeddings at
    position 0 count as zeros. Raises: ValueError on a wrong dtype or shape.
    """
    num_tokens, width = previous.shape
    check("input_ids", input_ids, torch.int64, num_tokens)
    check("positions", positions, torch.int64, num_tokens)
    check("embedding", embedding, previous.dtype, None, width)
    check("embedding_norm", embedding_norm, previous.dtype, width)
    check("hidden_norm", hidden_norm, previous.dtype, width)
    check_same_device(
        input_ids=input_ids, positions=positions, embedding=embedding, previous=previous,
        embedding_norm=embedding_norm, hidden_norm=hidden_norm,
    )  # fmt: skip
    if not embedding.is_contiguous():
        raise ValueError("embedding: expected a contiguous tensor")
    run = draft_layer_inputs_triton if previous.is_cuda else draft_layer_inputs_torch
    return run(
        input_ids, positions, embedding, previous, embedding_norm, hidden_norm, eps, hidden_first, mask_first
    )  # fmt: skip


def draft_layer_inputs_torch(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    previous: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    hidden_first: bool,
    mask_first: bool,
) -> torch.Tensor:
    """Return what `draft_layer_inputs` returns, in plain torch."""
    embedded = embedding[input_ids.clamp(min=0)]
    if mask_first:
        embedded.masked_fill_((positions == 0).unsqueeze(-1), 0)
    parts = [rms_norm_torch(embedded, embedding_norm, eps), rms_norm_torch(previous, hidden_norm, eps)]
    if hidden_first:
        parts.reverse()
    return torch.cat(parts, dim=-1)  # type: ignore[arg-type]


def draft_layer_inputs_triton(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    previous: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    hidden_first: bool,
    mask_first: bool,
) -> torch.Tensor:
    """Return what `draft_layer_inputs` returns, by two programs a token."""
    num_tokens, width = previous.shape
    out = torch.empty(num_tokens, 2 * width, dtype=previous.dtype, device=previous.device)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _draft_layer_inputs_kernel[(num_tokens, 2)](
            input_ids, positions, embedding, previous, previous.stride(0), embedding_norm, hidden_norm, out, width, eps,
            HIDDEN_FIRST=hidden_first, MASK_FIRST=mask_first, BLOCK=block, num_warps=max(1, min(8, block // 512)),
            **pdl(),
        )  # fmt: skip
    return out


@triton.jit
def _draft_layer_inputs_kernel(
    input_ids_ptr,
    positions_ptr,
    embedding_ptr,
    previous_ptr,
    previous_stride,
    embedding_norm_ptr,
    hidden_norm_ptr,
    out_ptr,
    width,
    eps,
    HIDDEN_FIRST: tl.constexpr,
    MASK_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) norms token t's embedding, (t, 1) its hidden state."""
    column = tl.arange(0, BLOCK)
    mask = column < width
    is_hidden = tl.program_id(1) == 1
    weight_ptr = embedding_norm_ptr
    if is_hidden:
        weight_ptr = hidden_norm_ptr
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    row_ptr = previous_ptr + token * previous_stride
    if not is_hidden:
        row_ptr = embedding_ptr + tl.maximum(tl.load(input_ids_ptr + token), 0) * width
    x = tl.load(row_ptr + column, mask=mask, other=0.0)
    if MASK_FIRST:
        is_masked = (not is_hidden) & (tl.load(positions_ptr + token) == 0)
        x = tl.where(is_masked, 0.0, x.to(tl.float32)).to(x.dtype)
    place = tl.program_id(1) ^ 1 if HIDDEN_FIRST else tl.program_id(1)
    tl.store(out_ptr + (2 * token + place) * width + column, normalised(x, weight, width, eps), mask=mask)
