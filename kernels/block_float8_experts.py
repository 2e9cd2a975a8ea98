"""The experts of a mixture layer with weights held in FP8 as checkpoints store them: see `moe_experts`.

A scale stands for each row of a weight and 128 columns, as in `block_float8_linear`: weights are turned into the
activations' dtype without loss, sums over 128 columns are scaled in float32. A row's bits do not depend on the tile it
lands in.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._expert_tiles import place_pairs
from specgen.kernels._triton import pdl, tile_height, tl, triton, wait_for_inputs
from specgen.kernels.block_float8_linear import BLOCK, FLOAT8, by_bits, dequantize_blocks, widen
from specgen.kernels.moe_experts import ExpertRows, moe_experts_torch
from specgen.kernels.silu_mul import rounded_silu_mul

# Tiles by height: columns, warps, stages. A row's bits are the same in each.
_TILES = {16: (64, 4, 5), 64: (64, 4, 4), 128: (64, 8, 3)}


class BlockScales(NamedTuple):
    """Scales of the experts' weights: `w13 [E, ceil(H / 128), 2 I] float32`, `w2 [E, ceil(I / 128), H] float32`."""

    w13: torch.Tensor
    w2: torch.Tensor


def block_float8_experts(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, scales: BlockScales
) -> ExpertRows:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every token and each of its experts e, as `moe_experts` does.

    x: [T, H], contiguous; ids: [T, k] int32 in [0, E); w13: [E, 2 I, H] and w2: [E, H, I] float8_e4m3fn, gate rows
    first. Every product rounds to x's dtype. Returns rows [n, H] and places [T, k] int32.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_tokens, hidden = x.shape
    num_experts, inner = w2.shape[0], w2.shape[2]
    check("x", x, x.dtype, None, None)
    check("ids", ids, torch.int32, num_tokens, None)
    check("w13", w13, FLOAT8, num_experts, 2 * inner, hidden)
    check("w2", w2, FLOAT8, None, hidden, None)
    check("scales.w13", scales.w13, torch.float32, num_experts, -(-hidden // BLOCK), 2 * inner)
    check("scales.w2", scales.w2, torch.float32, num_experts, -(-inner // BLOCK), hidden)
    check_same_device(x=x, ids=ids, w13=w13, w2=w2, scale13=scales.w13, scale2=scales.w2)
    for name, tensor in (("x", x), ("ids", ids), ("w13", w13), ("w2", w2), ("w13", scales.w13), ("w2", scales.w2)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    return (block_float8_experts_triton if x.is_cuda else block_float8_experts_torch)(x, ids, w13, w2, scales)


def block_float8_experts_torch(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, scales: BlockScales
) -> ExpertRows:
    """Return what `block_float8_experts` returns, by `moe_experts` with the weights of the experts in use."""
    used, local = torch.unique(ids, return_inverse=True)
    experts = used.tolist()
    wide13, wide2 = (
        torch.stack([dequantize_blocks(weights[e], scale[e], x.dtype) for e in experts])
        if experts
        else weights[:0].to(x.dtype)
        for weights, scale in ((w13, scales.w13), (w2, scales.w2))
    )
    return moe_experts_torch(x, local.to(torch.int32).contiguous(), wide13, wide2)


def block_float8_experts_triton(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, scales: BlockScales
) -> ExpertRows:
    """Return what `block_float8_experts` returns, by three kernels: place, gate-up with activation, down."""
    (num_tokens, hidden), top_k, (num_experts, _, inner) = x.shape, ids.shape[1], w2.shape
    num_pairs = ids.numel()
    out = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return ExpertRows(out, None)
    height = tile_height(_TILES, triton.cdiv(num_pairs, num_experts))  # near the mean of an expert's pairs
    columns, warps, stages = _TILES[height]
    tile_expert, tile_pairs = place_pairs(ids, num_experts, 0, num_experts, num_pairs, height)
    activated = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    for source, weights, scale, target, num_columns, width, pairs_a_row in (
        (x, w13, scales.w13, activated, inner, hidden, top_k),
        (activated, w2, scales.w2, out, hidden, inner, 1),
    ):
        _block_float8_grouped_kernel[(triton.cdiv(num_columns, columns), len(tile_expert))](
            source, weights, scale, target, tile_expert, tile_pairs, num_pairs, num_columns, width, pairs_a_row,
            GATED=weights is w13, ROWS=height, COLUMNS=columns, BLOCK=BLOCK, BY_BITS=by_bits(x), num_warps=warps,
            num_stages=stages, enable_fp_fusion=False, **pdl(),
        )  # fmt: skip
    return ExpertRows(out, None)


@triton.jit(do_not_specialize=["num_pairs"])
def _block_float8_grouped_kernel(
    x_ptr,
    weights_ptr,
    scale_ptr,
    out_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_columns,
    width,
    pairs_a_row,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = weight[expert] @ x[pair // pairs_a_row]; gated: silu of the first half's rows times the second's."""
    wait_for_inputs(PDL)
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(tile_pairs_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = pair < num_pairs
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        in_columns = column < num_columns
        k = tl.arange(0, BLOCK)
        x_rows = x_ptr + (pair // pairs_a_row)[:, None] * width
        num_rows = num_columns * (2 if GATED else 1)
        num_blocks = (width + BLOCK - 1) // BLOCK
        gate_rows = weights_ptr + (expert * num_rows + column)[:, None] * width
        up_rows = gate_rows + num_columns.to(tl.int64) * width
        scale_row = scale_ptr + expert * num_blocks * num_rows + column
        acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        acc_up = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        # A step's scales are loaded in the step before: nothing waits for them.
        next_scale = tl.load(scale_row, mask=in_columns, other=0.0)
        if GATED:
            next_scale_up = tl.load(scale_row + num_columns, mask=in_columns, other=0.0)
        for block in range(0, num_blocks):
            at = block * BLOCK + k
            in_width = at < width
            x = tl.load(x_rows + at[None, :], mask=real[:, None] & in_width[None, :], other=0.0)
            mask = in_width[None, :] & in_columns[:, None]
            next_row = scale_row + tl.minimum(block + 1, num_blocks - 1) * num_rows
            weight = tl.load(gate_rows + at[None, :], mask=mask, other=0.0)
            scale = next_scale
            next_scale = tl.load(next_row, mask=in_columns, other=0.0)
            product = tl.dot(widen(weight, x.dtype, BY_BITS), tl.trans(x), input_precision="ieee")
            acc = tl.fma(product, tl.broadcast_to(scale[:, None], COLUMNS, ROWS), acc)
            if GATED:
                weight = tl.load(up_rows + at[None, :], mask=mask, other=0.0)
                scale = next_scale_up
                next_scale_up = tl.load(next_row + num_columns, mask=in_columns, other=0.0)
                product = tl.dot(widen(weight, x.dtype, BY_BITS), tl.trans(x), input_precision="ieee")
                acc_up = tl.fma(product, tl.broadcast_to(scale[:, None], COLUMNS, ROWS), acc_up)
        if GATED:
            acc = rounded_silu_mul(acc, acc_up, x_ptr.dtype.element_ty)
        target = out_ptr + pair[None, :] * num_columns + column[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=real[None, :] & in_columns[:, None])
