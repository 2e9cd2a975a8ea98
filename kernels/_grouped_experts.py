"""Experts over tiles that gather their rows: each of a fixed number of (token, choice) pairs of one expert.

Grids come from bounds, without a look from the host, and tiles past the real ones return at once. Tokens that all fit
into one tile need no placing (`_expert_tiles`). With few tokens an expert, shared experts get taller tiles of their
own. A row's bits depend neither on the tile it lands in nor on the tile's height.
"""

import torch

from specgen.kernels._expert_tiles import find_few, place_pairs
from specgen.kernels._triton import ask_for, can_use_tma, descriptor, pdl, tile_height, tl, triton, wait_for_inputs
from specgen.kernels.float8_linear import narrow
from specgen.kernels.silu_mul import rounded_silu_mul

# Tiles of the grouped products by height: columns, inner, weights by TMA, warps, stages. A row's bits are the same in
# each.
_TILES = {
    16: (32, 128, False, 4, 4),
    32: (64, 128, True, 4, 3),
    64: (64, 64, True, 4, 4),
    128: (128, 64, True, 8, 4),
}
FEW_TOKENS = min(_TILES)  # so many fit into one tile, whatever they chose
_SHARING = 64  # from this height on it suits the shared experts as well, which then need no launch of their own


def grouped_products(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every token and its experts e in order: [T * k, H] in x's dtype.

    Arguments as of `moe_experts`.
    """
    (num_tokens, hidden), top_k, (num_experts, _, inner) = x.shape, ids.shape[1], w2.shape
    out = torch.empty(num_tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    x = narrow(x) if scales is not None else x
    activated = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if 0 < num_tokens <= FEW_TOKENS:
        _run_few_tokens(x, ids, w13, w2, activated, out, num_shared, scales)
        return out
    height = _tile_height(num_tokens * (top_k - num_shared), num_experts - num_shared)
    own_tiles = num_shared > 0 and height < _SHARING
    num_routed = num_experts - num_shared if own_tiles else num_experts
    groups = [(0, num_routed, num_tokens * (top_k - num_shared if own_tiles else top_k))]
    if own_tiles:
        groups.append((num_routed, num_experts, num_tokens * num_shared))
    for first, last, num_pairs in groups if num_tokens else []:
        _run_experts(x, ids, w13, w2, activated, out, first, last, num_pairs, scales)
    return out


def _tile_height(num_pairs: int, num_experts: int) -> int:
    """A height near the mean of an expert's pairs, so that weights are read few times."""
    return tile_height(_TILES, num_pairs / max(num_experts, 1))


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
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Fill all rows of `activated` and `out`: a tile holds all tokens, and an expert in use has one, shared ones first.

    So nothing has to be placed, and the shared experts' weights are asked for while the router still runs.
    """
    (num_tokens, top_k), (num_experts, hidden, inner) = ids.shape, w2.shape
    num_routed = num_experts - num_shared
    num_tiles = num_shared + min(num_routed, num_tokens * (top_k - num_shared))
    rows = FEW_TOKENS
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
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Fill the rows of `activated` and `out` whose expert is in [first, last): `num_own` (token, choice) pairs."""
    num_pairs, top_k, (_, hidden, inner) = ids.numel(), ids.shape[1], w2.shape
    rows = _tile_height(num_own, last - first)
    tile_expert, tile_pairs = place_pairs(ids, w2.shape[0], first, last, num_own, rows)
    columns, step, by_tma, warps, stages = _tile(rows, x.itemsize)
    grid = {"ROWS": rows, "COLUMNS": columns, "INNER": step, "num_warps": warps, "num_stages": stages, **pdl()}
    scale13, scale2 = scales or (None, None)
    for source, weights, scale, target, num_columns, width, pairs_a_row in (
        (x, w13, scale13, activated, inner, hidden, top_k),
        (activated, w2, scale2, out, hidden, inner, 1),
    ):
        tma = by_tma and scales is None and can_use_tma(weights)
        _grouped_kernel[(triton.cdiv(num_columns, columns), len(tile_expert))](
            source, descriptor(weights.flatten(0, 1), [columns, step]) if tma else weights, scale, target, tile_expert,
            tile_pairs, num_pairs, num_columns, width, pairs_a_row, 0, 0, GATED=weights is w13, BY_TMA=tma,
            SCALED=scale is not None, TOP_K=0, CHOICES=0, EXPERTS=0, LINES=0, **grid,
        )  # fmt: skip


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
def _load_step(weights, rows, start, k, mask, BY_TMA: tl.constexpr):
    """Return a step's weights [INNER, COLUMNS]. rows: pointers to the columns' rows, BY_TMA the number of the first."""
    if BY_TMA:
        step = tl.trans(weights.load([rows, start]))
    else:
        step = tl.load(rows + (start + k)[:, None], mask=mask, other=0.0)
    return step


@triton.jit
def _gated(gate, up, x_ptr, out_ptr, SCALED: tl.constexpr):
    """Return silu(gate) * up in float32, as it goes from x's dtype into out's."""
    if SCALED:  # not rounded
        gated = rounded_silu_mul(gate, up, tl.float32)
    else:
        gated = rounded_silu_mul(gate, up, x_ptr.dtype.element_ty)
    if SCALED and out_ptr.dtype.element_ty == tl.float16:
        gated = tl.clamp(gated, -65504.0, 65504.0)  # what came of bfloat16 may be beyond
    return gated


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x_ptr, weights, scale_ptr, out_ptr, tile_expert_ptr, tile_pairs_ptr, num_pairs, num_columns, width, pairs_a_row,
    num_routed, num_shared, GATED: tl.constexpr, BY_TMA: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
        wait_for_inputs(PDL)  # and not earlier: the second product reads tiles and choices before it waits
    if TOP_K > 0:
        expert, pair = find_few(
            tile, tile_expert_ptr, num_pairs, num_routed, num_shared, ROWS, TOP_K, CHOICES, EXPERTS
        )  # fmt: skip
        expert = expert.to(tl.int64)
        pair = pair.to(tl.int64)
    else:
        expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if not GATED:
        wait_for_inputs(PDL)
    if expert >= 0:
        if TOP_K == 0:
            pair = tl.load(tile_pairs_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = pair < num_pairs
        in_columns = column < num_columns
        k = tl.arange(0, INNER)
        x_rows = x_ptr + (pair // pairs_a_row)[:, None] * width
        first_row = expert * num_columns * (2 if GATED else 1)
        if BY_TMA:
            gate_rows = (first_row + tl.program_id(0) * COLUMNS).to(tl.int32)
            up_rows = gate_rows + num_columns
        else:
            gate_rows = weights + (first_row + column)[None, :] * width
            up_rows = gate_rows + num_columns.to(tl.int64) * width
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, INNER):
            in_width = start + k < width
            x = tl.load(x_rows + (start + k)[None, :], mask=real[:, None] & in_width[None, :], other=0.0)
            mask = in_width[:, None] & in_columns[None, :]
            weight = _load_step(weights, gate_rows, start, k, mask, BY_TMA)
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
            if GATED:
                weight_up = _load_step(weights, up_rows, start, k, mask, BY_TMA)
                acc_up = tl.dot(x, weight_up.to(x.dtype), acc_up, input_precision="ieee")
        if SCALED:
            acc *= tl.load(scale_ptr + first_row + column, mask=in_columns, other=0.0)[None, :]
            if GATED:
                acc_up *= tl.load(scale_ptr + first_row + num_columns + column, mask=in_columns, other=0.0)[None, :]
        if GATED:
            acc = _gated(acc, acc_up, x_ptr, out_ptr, SCALED)
        target = out_ptr + pair[:, None] * num_columns + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_columns[None, :])
