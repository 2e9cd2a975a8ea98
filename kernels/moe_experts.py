"""The routed experts of a mixture layer: grouped gate-up product, gated activation, grouped down product, weighted sum.

It knows which expert each token chose, not why. A row's bits don't depend on the tile it lands in: products keep row
bits (`linear`), and a token's experts are summed in its own top-k order. The Triton path sorts tokens by expert into
tiles of a fixed number of rows without a look from the host: its grids come from bounds, and tiles past the real ones
return at once.
"""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton
from specgen.kernels.linear import ROW_MULTIPLE, linear_torch
from specgen.kernels.silu_mul import silu_mul_torch

# Tiles of the grouped products: never a function of the number of tokens, or rows would change their bits with it.
_TILE_HEIGHTS = (16, 32, 64, 128)  # rows of a tile; a row's bits are the same in each
_TILE_COLUMNS = 64
_TILE_INNER = 64
_COMBINE_BLOCK = 1024
_SCAN = 1024  # pairs a step when sorting by expert


def moe_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return, for each token, the sum over its experts e of weight * w2[e] @ silu_mul(w13[e] @ x).

    x: [T, H], contiguous; topk_weights: [T, k] float32; topk_ids: [T, k] int32 in [0, E); w13: [E, 2 I, H], gate rows
    first; w2: [E, H, I]; weights and x of one dtype. Products round to x's dtype, the sum runs in float32 and top-k
    order.
    Returns [T, H] in x's dtype. Raises: ValueError on a wrong dtype or shape.
    """
    num_tokens, hidden = x.shape
    num_experts, inner = w2.shape[0], w2.shape[2]
    check("x", x, x.dtype, None, None)
    check("topk_weights", topk_weights, torch.float32, num_tokens, None)
    check("topk_ids", topk_ids, torch.int32, num_tokens, topk_weights.shape[1])
    check("w13", w13, x.dtype, num_experts, 2 * inner, hidden)
    check("w2", w2, x.dtype, None, hidden, None)
    check_same_device(x=x, topk_weights=topk_weights, topk_ids=topk_ids, w13=w13, w2=w2)
    for name, tensor in (("x", x), ("topk_weights", topk_weights), ("topk_ids", topk_ids), ("w13", w13), ("w2", w2)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    return (moe_experts_triton if x.is_cuda else moe_experts_torch)(x, topk_weights, topk_ids, w13, w2)


def moe_experts_torch(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return what `moe_experts` returns, in plain torch: one pair of products an active expert."""
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return x.clone()
    pair_expert = topk_ids.numpy().reshape(-1)
    counts = np.bincount(pair_expert, minlength=w13.shape[0])
    # Each expert's rows start at a multiple of 16 and are filled up with copies of row 0, as the products want them.
    padded = -(-counts // ROW_MULTIPLE) * ROW_MULTIPLE
    starts = np.cumsum(padded) - padded
    order = np.argsort(pair_expert, kind="stable")
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[pair_expert[order]]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = starts[pair_expert[order]] + rank
    row_token = np.zeros(int(padded.sum()), dtype=np.int64)
    row_token[place] = np.arange(len(order)) // top_k

    rows = x.index_select(0, torch.from_numpy(row_token))
    segments = [(e, int(starts[e]), int(starts[e] + padded[e])) for e in np.flatnonzero(counts).tolist()]
    gate_up = torch.cat([linear_torch(rows[a:b], w13[e]) for e, a, b in segments])
    inner = silu_mul_torch(gate_up)
    down = torch.cat([linear_torch(inner[a:b], w2[e]) for e, a, b in segments])
    by_pair = down.index_select(0, torch.from_numpy(place)).view(num_tokens, top_k, -1)
    out = by_pair[:, 0] * topk_weights[:, 0, None]
    for j in range(1, top_k):
        out += by_pair[:, j] * topk_weights[:, j, None]
    return out.to(x.dtype)


def moe_experts_triton(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return what `moe_experts` returns, by five kernels: count, place, gate-up with activation, down, combine."""
    (num_tokens, hidden), top_k, (num_experts, _, inner) = x.shape, topk_ids.shape[1], w2.shape
    out = torch.empty_like(x)
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * top_k
    tile_rows = _tile_rows(num_pairs, num_experts)
    # Every expert in use adds at most one tile that isn't full.
    max_tiles = min(num_pairs, num_pairs // tile_rows + min(num_experts, num_pairs))
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    tile_expert = torch.empty(max_tiles, dtype=torch.int32, device=x.device)
    tile_pairs = torch.empty(max_tiles * tile_rows, dtype=torch.int32, device=x.device)
    _count_kernel[(num_experts,)](topk_ids, counts, num_pairs, SCAN=_SCAN)
    _place_kernel[(num_experts + 1,)](
        topk_ids,
        counts,
        tile_expert,
        tile_pairs,
        num_pairs,
        num_experts,
        max_tiles,
        ROWS=tile_rows,
        SCAN=_SCAN,
        EXPERTS=triton.next_power_of_2(num_experts),
    )
    activated = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    by_pair = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    tiles = {"ROWS": tile_rows, "COLUMNS": _TILE_COLUMNS, "INNER": _TILE_INNER}
    grid = (triton.cdiv(inner, _TILE_COLUMNS), max_tiles)
    _grouped_kernel[grid](
        x, w13, activated, tile_expert, tile_pairs, num_pairs, inner, hidden, top_k, GATED=True, num_warps=4, **tiles
    )
    grid = (triton.cdiv(hidden, _TILE_COLUMNS), max_tiles)
    _grouped_kernel[grid](
        activated, w2, by_pair, tile_expert, tile_pairs, num_pairs, hidden, inner, 1, GATED=False, num_warps=4, **tiles
    )
    _combine_kernel[(num_tokens, triton.cdiv(hidden, _COMBINE_BLOCK))](
        by_pair, topk_weights, out, hidden, TOP_K=top_k, BLOCK=_COMBINE_BLOCK
    )
    return out


def _tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the tile height for so many pairs: near the mean of an expert's, so that weights are read few times."""
    mean = num_pairs / num_experts
    return next((height for height in _TILE_HEIGHTS if height >= mean), _TILE_HEIGHTS[-1])


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, SCAN: tl.constexpr):
    """counts[e] = number of (token, choice) pairs of expert e."""
    expert = tl.program_id(0)
    pair = tl.arange(0, SCAN)
    total = tl.zeros([SCAN], dtype=tl.int32)
    for start in range(0, num_pairs, SCAN):
        ids = tl.load(ids_ptr + start + pair, mask=start + pair < num_pairs, other=-1)
        total += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_experts,
    max_tiles,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """An expert's tiles follow those of the experts before it and hold its pairs in order, `num_pairs` past the last.

    The program after the last expert's marks the tiles that nobody uses with expert -1.
    """
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < num_experts, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(each == expert, tiles, 0), axis=0)
    item = tl.arange(0, SCAN)
    if expert == num_experts:
        for start in range(first_tile, max_tiles, SCAN):
            tl.store(tile_expert_ptr + start + item, -1, mask=start + item < max_tiles)
    else:
        for start in range(0, own_tiles, SCAN):
            tl.store(tile_expert_ptr + first_tile + start + item, expert, mask=start + item < own_tiles)
        placed = first_tile * ROWS
        for start in range(0, num_pairs, SCAN):
            ids = tl.load(ids_ptr + start + item, mask=start + item < num_pairs, other=-1)
            mine = (ids == expert).to(tl.int32)
            rank = tl.cumsum(mine, axis=0) - 1
            tl.store(tile_pairs_ptr + placed + rank, start + item, mask=mine > 0)
            placed += tl.sum(mine, axis=0)
        end = (first_tile + own_tiles) * ROWS
        filler = tl.arange(0, ROWS)
        tl.store(tile_pairs_ptr + placed + filler, num_pairs, mask=placed + filler < end)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
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
    INNER: tl.constexpr,
):
    """out[pair] = weight[expert] @ x[pair // pairs_a_row]; gated: silu of the first half's rows times the second's."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(tile_pairs_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = pair < num_pairs
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        in_columns = column < num_columns
        k = tl.arange(0, INNER)
        x_rows = x_ptr + (pair // pairs_a_row)[:, None] * width
        weight_rows = weight_ptr + expert * (num_columns * width * (2 if GATED else 1))
        gate_rows = weight_rows + column[None, :] * width
        up_rows = gate_rows + num_columns.to(tl.int64) * width
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, INNER):
            in_width = start + k < width
            x = tl.load(x_rows + (start + k)[None, :], mask=real[:, None] & in_width[None, :], other=0.0)
            mask = in_width[:, None] & in_columns[None, :]
            weight = tl.load(gate_rows + (start + k)[:, None], mask=mask, other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
            if GATED:
                weight_up = tl.load(up_rows + (start + k)[:, None], mask=mask, other=0.0)
                acc_up = tl.dot(x, weight_up, acc_up, input_precision="ieee")
        if GATED:
            # Rounded as two separate products would be.
            gate = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
            up = acc_up.to(x_ptr.dtype.element_ty).to(tl.float32)
            acc = gate / (1.0 + tl.exp(-gate)) * up
        target = out_ptr + pair[:, None] * num_columns + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_columns[None, :])


@triton.jit
def _combine_kernel(by_pair_ptr, weights_ptr, out_ptr, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + j)
        row = by_pair_ptr + (token * TOP_K + j) * hidden
        acc += weight * tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, acc.to(out_ptr.dtype.element_ty), mask=mask)
