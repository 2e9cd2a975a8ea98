"""The experts of a mixture layer: grouped gate-up product, gated activation, grouped down product.

It knows which expert each token chose, not why. A row's bits don't depend on the tile it lands in: products keep row
bits (`linear`). The Triton path sorts tokens by expert into tiles of a fixed number of rows without a look from the
host: its grids come from bounds, and tiles past the real ones return at once. Experts that every token takes (shared
ones) are the last: with few tokens an expert they get taller tiles of their own. With many tokens, on Hopper with more
than one tile holds, rows are sorted first (`_sorted_experts`); their bits are the same.

Weights may be held in FP8 with a scale a row (`float8_linear`), as those of draft layers. They go through the tiles
whatever the number of tokens: sorted rows are for the many layers that do not draft.
"""

from typing import NamedTuple

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._sorted_experts import sort_pairs, sorted_products, tile_height
from specgen.kernels._triton import ask_for, can_use_tma, descriptor, is_hopper, pdl, tl, triton, wait_for_inputs
from specgen.kernels.float8_linear import FLOAT8, Float8Weight, dequantize_rows, narrow
from specgen.kernels.linear import ROW_MULTIPLE, linear_torch
from specgen.kernels.silu_mul import silu_mul_torch

# Tiles of the grouped products by height: columns, inner, weights by TMA, warps, stages. A row's bits are the same in
# each.
_TILES = {
    16: (32, 128, False, 4, 4),
    32: (64, 128, True, 4, 3),
    64: (64, 64, True, 4, 4),
    128: (128, 64, True, 8, 4),
}
_SHARING = 64  # from this height on it suits the shared experts as well, which then need no launch of their own
_MANY_TOKENS = 1024  # from so many on rows are sorted, where TMA loads blocks; on Hopper from more than a tile holds
_SCAN = 1024  # pairs a step when sorting by expert; four times that for many


class ExpertScales(NamedTuple):
    """Scales of FP8 weights, one a row: `w13 [E, 2 I] float32`, `w2 [E, H] float32`."""

    w13: torch.Tensor
    w2: torch.Tensor


class ExpertRows(NamedTuple):
    """What the experts made of the tokens: choice j of token t is `rows[places[t, j]]`, or row t * k + j without."""

    rows: torch.Tensor
    places: torch.Tensor | None


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every token and each of its experts e.

    x: [T, H], contiguous; ids: [T, k] int32 in [0, E), the last num_shared of them the same for every token and the
    highest; w13: [E, 2 I, H], gate rows first; w2: [E, H, I]; weights and x of one dtype. Every product rounds to x's
    dtype. With `scales` weights are FP8, and what stands between the products isn't rounded, or to float16.
    Returns rows [n, H] in x's dtype and places [T, k] int32. Raises: ValueError on a wrong dtype or shape.
    """
    num_tokens, hidden = x.shape
    num_experts, inner = w2.shape[0], w2.shape[2]
    check("x", x, x.dtype, None, None)
    check("ids", ids, torch.int32, num_tokens, None)
    held = x.dtype if scales is None else FLOAT8
    check("w13", w13, held, num_experts, 2 * inner, hidden)
    check("w2", w2, held, None, hidden, None)
    if scales is not None:
        check("scales.w13", scales.w13, torch.float32, num_experts, 2 * inner)
        check("scales.w2", scales.w2, torch.float32, num_experts, hidden)
    check_same_device(x=x, ids=ids, w13=w13, w2=w2)
    for name, tensor in (("x", x), ("ids", ids), ("w13", w13), ("w2", w2)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    if not 0 <= num_shared <= min(ids.shape[1], num_experts):
        raise ValueError(f"num_shared: expected 0..{min(ids.shape[1], num_experts)}, got {num_shared}")
    if not x.is_cuda:
        return moe_experts_torch(x, ids, w13, w2, num_shared, scales)
    are_many = num_tokens >= _MANY_TOKENS or (num_tokens > min(_TILES) and is_hopper())
    if are_many and x.dtype == torch.bfloat16 and scales is None and can_use_tma(w13, w2):
        return moe_experts_sorted(x, ids, w13, w2, num_shared)
    return moe_experts_triton(x, ids, w13, w2, num_shared, scales)


def moe_experts_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return what `moe_experts` returns, in plain torch: one pair of products an active expert."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return ExpertRows(x, None)
    pair_expert = ids.numpy().reshape(-1)
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

    def weight_of(weights: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
        held = weights[expert]
        return held if scale is None else dequantize_rows(Float8Weight(held, scale[expert]), x.dtype)

    scale13, scale2 = scales or (None, None)
    gate_up = torch.cat([linear_torch(rows[a:b], weight_of(w13, scale13, e)) for e, a, b in segments])
    inner = silu_mul_torch(gate_up)
    down = torch.cat([linear_torch(inner[a:b], weight_of(w2, scale2, e)) for e, a, b in segments])
    return ExpertRows(down, torch.from_numpy(place.astype(np.int32)).view(num_tokens, top_k))


def moe_experts_sorted(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, num_shared: int = 0
) -> ExpertRows:
    """Return what `moe_experts` returns, over rows sorted by expert. Half precision, weights that TMA can load."""
    if not len(x):
        return ExpertRows(x, None)
    num_routed = w2.shape[0] - num_shared
    height = tile_height(len(x) * (ids.shape[1] - num_shared), num_routed)
    pairs = sort_pairs(ids, w2.shape[0], num_shared, height)
    return ExpertRows(sorted_products(x, pairs, w13, w2), pairs.places.view(ids.shape))


def moe_experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return what `moe_experts` returns, by three kernels: place, gate-up with activation, down."""
    (num_tokens, hidden), top_k, (num_experts, _, inner) = x.shape, ids.shape[1], w2.shape
    out = torch.empty(num_tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    x = narrow(x) if scales is not None else x
    activated = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if 0 < num_tokens <= min(_TILES):
        _run_few_tokens(x, ids, w13, w2, activated, out, num_shared, scales)
        return ExpertRows(out, None)
    height = _tile_height(num_tokens * (top_k - num_shared), num_experts - num_shared)
    own_tiles = num_shared > 0 and height < _SHARING
    num_routed = num_experts - num_shared if own_tiles else num_experts
    groups = [(0, num_routed, num_tokens * (top_k - num_shared if own_tiles else top_k))]
    if own_tiles:
        groups.append((num_routed, num_experts, num_tokens * num_shared))
    for first, last, num_pairs in groups if num_tokens else []:
        _run_experts(x, ids, w13, w2, activated, out, first, last, num_pairs, scales)
    return ExpertRows(out, None)


def place_options(num_pairs: int) -> dict[str, int]:
    """Options of `place_kernel` for so many pairs: fewer, wider steps for many."""
    return {"SCAN": 4 * _SCAN, "num_warps": 8} if num_pairs > 8 * _SCAN else {"SCAN": _SCAN, "num_warps": 4}


def _tile_height(num_pairs: int, num_experts: int) -> int:
    """A height near the mean of an expert's pairs, so that weights are read few times."""
    return next((height for height in _TILES if height * num_experts >= num_pairs), max(_TILES))


def _tile(height: int, itemsize: int) -> tuple[int, int, bool, int, int]:
    """Return what _TILES has for a height; of float32 two stages fit."""
    columns, inner, by_tma, warps, stages = _TILES[height]
    return columns, inner, by_tma, warps, stages if itemsize <= 2 else 2


def _run_few_tokens(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activated: torch.Tensor,
    out: torch.Tensor,
    num_shared: int,
    scales: ExpertScales | None,
) -> None:
    """Fill all rows of `activated` and `out`: a tile holds all tokens, and an expert in use has one, shared ones first.

    So nothing has to be placed, and the shared experts' weights are asked for while the router still runs.
    """
    (num_tokens, top_k), (num_experts, hidden, inner) = ids.shape, w2.shape
    num_routed = num_experts - num_shared
    num_tiles = num_shared + min(num_routed, num_tokens * (top_k - num_shared))
    rows = min(_TILES)
    columns, step, _, warps, stages = _tile(rows, x.itemsize)
    scale13, scale2 = scales or (None, None)
    for source, weights, scale, target, num_columns, width, pairs_a_row in (
        (x, w13, scale13, activated, inner, hidden, top_k),
        (activated, w2, scale2, out, hidden, inner, 1),
    ):
        _grouped_kernel[(triton.cdiv(num_columns, columns), num_tiles)](
            source, weights, scale, target, ids, ids, ids.numel(), num_columns, width, pairs_a_row, num_routed,
            num_shared, GATED=weights is w13, BY_TMA=False, SCALED=scale is not None, ROWS=rows, COLUMNS=columns,
            INNER=step, TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k),
            EXPERTS=triton.next_power_of_2(max(1, num_routed)),
            LINES=triton.next_power_of_2(triton.cdiv(width * weights.itemsize, 128)), num_warps=warps,
            num_stages=stages, **pdl(),
        )  # fmt: skip


def _run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activated: torch.Tensor,
    out: torch.Tensor,
    first: int,
    last: int,
    num_own: int,
    scales: ExpertScales | None,
) -> None:
    """Fill the rows of `activated` and `out` whose expert is in [first, last): `num_own` (token, choice) pairs."""
    num_pairs, top_k, (_, hidden, inner) = ids.numel(), ids.shape[1], w2.shape
    rows = _tile_height(num_own, last - first)
    # Every expert in use adds at most one tile that isn't full.
    max_tiles = min(num_own, num_own // rows + min(last - first, num_own))
    tile_expert = torch.empty(max_tiles, dtype=torch.int32, device=x.device)
    tile_pairs = torch.empty(max_tiles * rows, dtype=torch.int32, device=x.device)
    experts = triton.next_power_of_2(w2.shape[0])
    place_kernel[(last - first + 1,)](
        ids, tile_expert, tile_pairs, num_pairs, first, last, max_tiles, ROWS=rows, EXPERTS=experts,
        **place_options(num_pairs), **pdl(),
    )  # fmt: skip
    columns, step, by_tma, warps, stages = _tile(rows, x.itemsize)
    grid = {"ROWS": rows, "COLUMNS": columns, "INNER": step, "num_warps": warps, "num_stages": stages, **pdl()}
    scale13, scale2 = scales or (None, None)
    for source, weights, scale, target, num_columns, width, pairs_a_row in (
        (x, w13, scale13, activated, inner, hidden, top_k),
        (activated, w2, scale2, out, hidden, inner, 1),
    ):
        tma = by_tma and scales is None and can_use_tma(weights)
        _grouped_kernel[(triton.cdiv(num_columns, columns), max_tiles)](
            source, descriptor(weights.flatten(0, 1), [columns, step]) if tma else weights, scale, target, tile_expert,
            tile_pairs, num_pairs, num_columns, width, pairs_a_row, 0, 0, GATED=weights is w13, BY_TMA=tma,
            SCALED=scale is not None, TOP_K=0, CHOICES=0, EXPERTS=0, LINES=0, **grid,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def place_kernel(
    ids_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    first,
    last,
    max_tiles,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """An expert's tiles follow those of the experts before it and hold its pairs in order, `num_pairs` past the last.

    For the experts in [first, last). The program after the last one's marks the tiles that nobody uses with expert -1.
    """
    wait_for_inputs(PDL)
    expert = first + tl.program_id(0)
    item = tl.arange(0, SCAN)
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, num_pairs, SCAN):
        real = start + item < num_pairs
        ids = tl.load(ids_ptr + start + item, mask=real, other=0)
        counts += tl.histogram(ids, EXPERTS, mask=real)
    each = tl.arange(0, EXPERTS)
    tiles = tl.where((each >= first) & (each < last), (counts + ROWS - 1) // ROWS, 0)
    first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(each == expert, tiles, 0), axis=0)
    if expert == last:
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


@triton.jit
def _ask_for_shared(weights, tile, column, num_routed, num_shared, num_columns, width, LINES: tl.constexpr):
    """Ask the second-level cache for a tile's rows of a shared expert's gate and up weights."""
    if tile < num_shared:
        in_line: tl.constexpr = 128 // (weights.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.minimum(tl.arange(0, LINES) * in_line, width - 1)[None, :]
        gate_row = (num_routed + tile).to(tl.int64) * (2 * num_columns) + tl.minimum(column, num_columns - 1)
        ask_for(weights + gate_row[:, None] * width + line)
        ask_for(weights + (gate_row + num_columns)[:, None] * width + line)


@triton.jit
def _find_few(
    tile, ids_ptr, num_pairs, num_routed, num_shared, ROWS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Return (expert, or -1, and each token's pair with it, or num_pairs): shared experts first, then those in use."""
    token = tl.arange(0, ROWS)
    choice = tl.arange(0, CHOICES)
    pair = token[:, None] * TOP_K + choice[None, :]
    ids = tl.load(ids_ptr + pair, mask=(choice < TOP_K)[None, :] & (pair < num_pairs), other=-1)
    expert = num_routed + tile
    if tile >= num_shared:
        each = tl.arange(0, EXPERTS)
        flat = tl.reshape(ids, [ROWS * CHOICES])
        in_use = tl.max((flat[:, None] == each[None, :]).to(tl.int32), axis=0) * (each < num_routed).to(tl.int32)
        here = (in_use > 0) & (tl.cumsum(in_use, axis=0) - 1 == tile - num_shared)
        expert = tl.max(tl.where(here, each, -1), axis=0)
    chosen = (ids == expert) & (expert >= 0)
    return expert, tl.min(tl.where(chosen, pair, num_pairs), axis=1)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x_ptr,
    weights,
    scale_ptr,
    out_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_columns,
    width,
    pairs_a_row,
    num_routed,
    num_shared,
    GATED: tl.constexpr,
    BY_TMA: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = weight[expert] @ x[pair // pairs_a_row]; gated: silu of the first half's rows times the second's.

    weights: a pointer, or with BY_TMA the descriptor of all experts' rows in blocks [COLUMNS, INNER]. SCALED: they
    are FP8, and scale_ptr has a factor for each row. TOP_K > 0: tiles are not placed, and both pointers to them are to
    the choices of at most ROWS tokens.
    """
    tile = tl.program_id(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    if GATED:
        if (TOP_K > 0) & PDL:
            _ask_for_shared(weights, tile, column, num_routed, num_shared, num_columns, width, LINES)
        wait_for_inputs(PDL)
    if TOP_K > 0:
        expert, pair = _find_few(
            tile, tile_expert_ptr, num_pairs, num_routed, num_shared, ROWS, TOP_K, CHOICES, EXPERTS
        )  # fmt: skip
        expert = expert.to(tl.int64)
        pair = pair.to(tl.int64)
    else:
        expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if not GATED:
        wait_for_inputs(PDL)  # tiles and choices are older than the gated product
    if expert >= 0:
        if TOP_K == 0:
            pair = tl.load(tile_pairs_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = pair < num_pairs
        in_columns = column < num_columns
        k = tl.arange(0, INNER)
        x_rows = x_ptr + (pair // pairs_a_row)[:, None] * width
        first_row = expert * num_columns * (2 if GATED else 1)
        if BY_TMA:
            block_row = (first_row + tl.program_id(0) * COLUMNS).to(tl.int32)
        else:
            gate_rows = weights + (first_row + column)[None, :] * width
            up_rows = gate_rows + num_columns.to(tl.int64) * width
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, INNER):
            in_width = start + k < width
            x = tl.load(x_rows + (start + k)[None, :], mask=real[:, None] & in_width[None, :], other=0.0)
            mask = in_width[:, None] & in_columns[None, :]
            if BY_TMA:
                weight = tl.trans(weights.load([block_row, start]))
            else:
                weight = tl.load(gate_rows + (start + k)[:, None], mask=mask, other=0.0)
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
            if GATED:
                if BY_TMA:
                    weight_up = tl.trans(weights.load([block_row + num_columns, start]))
                else:
                    weight_up = tl.load(up_rows + (start + k)[:, None], mask=mask, other=0.0)
                acc_up = tl.dot(x, weight_up.to(x.dtype), acc_up, input_precision="ieee")
        if SCALED:
            acc *= tl.load(scale_ptr + first_row + column, mask=in_columns, other=0.0)[None, :]
            if GATED:
                acc_up *= tl.load(scale_ptr + first_row + num_columns + column, mask=in_columns, other=0.0)[None, :]
        if GATED:
            if not SCALED:  # rounded as two separate products would be
                acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
                acc_up = acc_up.to(x_ptr.dtype.element_ty).to(tl.float32)
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
            if SCALED and out_ptr.dtype.element_ty == tl.float16:
                acc = tl.clamp(acc, -65504.0, 65504.0)  # what came of bfloat16 may be beyond
        target = out_ptr + pair[:, None] * num_columns + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_columns[None, :])
