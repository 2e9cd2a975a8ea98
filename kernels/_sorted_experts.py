"""Experts over rows sorted by expert, so that both operands of the products come in whole blocks.

A program takes a tile (rows of one expert) and some columns of its weight; programs that run at once share either. On
Hopper it takes one such item after the other (`_sorted_hopper`). Sums run over the inner dimension in order, as in
`moe_experts`: the bits are the same.

The tiles of shared experts, of which there are many for one weight, stand in groups between those of the routed ones:
they keep the tensor cores busy while the others wait for memory.
"""

from functools import partial
from typing import NamedTuple

import torch

from specgen.kernels._sorted_hopper import TALL, product_hopper_kernel, store_layout
from specgen.kernels._triton import (
    descriptor,
    hopper_descriptor,
    is_hopper,
    launched,
    num_processors,
    pdl,
    start_next_and_wait,
    tile_height,
    tl,
    triton,
    wait_for_inputs,
)
from specgen.kernels.silu_mul import rounded_silu_mul

# By a tile's height: columns, inner, stages of the gated product (of each of its two) and of the second one.
_TILES = {
    16: ((64, 128, 5), (128, 128, 5)),
    32: ((64, 128, 5), (128, 128, 5)),
    64: ((64, 128, 4), (128, 128, 4)),
    TALL: ((128, 64, 4), (256, 64, 4)),
}
_ROOM = 6  # square roots of an expert's mean rows that a tile has room for beyond them
_GROUP = 4  # tiles of shared experts that stand together
_CHUNK = 2048  # pairs that one program counts, and sorts


class SortedPairs(NamedTuple):
    """(token, choice) pairs by expert, each expert's in order.

    tokens: [P] int32, the token of each sorted row. places: [P] int32, where pair t * k + j is. tiles: [3, n] int32, a
    tile's expert, first row and the row behind its last; num_tiles: [1] int32, how many of the n there are. height: the
    most rows of a tile.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    height: int


def roomy_height(num_pairs: int, num_experts: int) -> int:
    """Return a tile's height with room for most experts' rows, of `num_pairs` (token, choice) pairs.

    Rows that are not there cost little, and a second tile for an expert reads its weights again.
    """
    mean = num_pairs / max(num_experts, 1)
    return tile_height(_TILES, mean + _ROOM * mean**0.5)


def sort_pairs(ids: torch.Tensor, num_experts: int, num_shared: int = 0, height: int = TALL) -> SortedPairs:
    """Return the pairs of `ids [T, k] int32` in [0, num_experts), sorted by expert, in tiles of `height` rows.

    The tiles of the last `num_shared` experts, which every token takes, stand between those of the others.
    """
    num_pairs, device = ids.numel(), ids.device
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    max_tiles = num_pairs // height + min(num_experts, num_pairs)  # every expert in use: one that isn't full
    experts = triton.next_power_of_2(num_experts)
    counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=device)
    pairs = SortedPairs(
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(3, max_tiles, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        height,
    )
    options = {"CHUNK": _CHUNK, "EXPERTS": experts, **pdl()}
    _count_kernel[(num_chunks,)](ids, counts, num_pairs, **options)
    _sort_kernel[(num_experts, num_chunks)](
        ids, counts, *pairs[:4], num_pairs, ids.shape[1], num_experts, num_shared, max_tiles, ROWS=height, GROUP=_GROUP,
        CHUNKS=_looked_at(num_chunks), **options,
    )  # fmt: skip
    return pairs


def _looked_at(num_chunks: int) -> int:
    """Return how many chunks' counts a program of `_sort_kernel` looks at: few numbers, for few kernels to compile."""
    return next((few for few in (1, 8, 64) if few >= num_chunks), triton.next_power_of_2(num_chunks))


def sorted_products(x: torch.Tensor, pairs: SortedPairs, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every sorted row: [P, H] in x's dtype. Weights as in `moe_experts`."""
    rows = torch.empty(len(pairs.tokens), x.shape[1], dtype=x.dtype, device=x.device)
    # It waits for sorting to end before it lets the first product begin, which reads tiles at once.
    _gather_kernel[(len(rows),)](
        x, pairs.tokens, rows, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=4, **pdl()
    )
    activated = torch.empty(len(rows), w2.shape[2], dtype=x.dtype, device=x.device)
    # The second product's rows take the place of the gathered ones, which nobody reads any more.
    gated, down = _TILES[pairs.height]
    for product in ((rows, w13, activated, pairs, True, *gated), (activated, w2, rows, pairs, False, *down)):
        if not (x.is_cuda and is_hopper() and launched("experts of many tokens", partial(_run_hopper, *product))):
            _run(*product)
    return rows


def _run(
    rows: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    pairs: SortedPairs,
    gated: bool,
    columns: int,
    inner: int,
    stages: int,
) -> None:
    """Fill `out` by one product."""
    max_tiles, num_columns = pairs.tiles.shape[1], out.shape[1]
    _product_kernel[(max_tiles * triton.cdiv(num_columns, columns),)](
        descriptor(rows, [pairs.height, inner]), descriptor(weights.flatten(0, 1), [columns, inner]), out, pairs.tiles,
        pairs.num_tiles, max_tiles, num_columns, rows.shape[1], GATED=gated, ROWS=pairs.height, COLUMNS=columns,
        INNER=inner, num_warps=8 if pairs.height == TALL else 4, num_stages=stages,
    )  # fmt: skip


def _run_hopper(
    rows: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    pairs: SortedPairs,
    gated: bool,
    columns: int,
    inner: int,
    stages: int,
) -> None:
    """As `_run`."""
    is_tall = pairs.height == TALL
    product_hopper_kernel[(num_processors(),)](
        hopper_descriptor(rows, [pairs.height, inner]), hopper_descriptor(weights.flatten(0, 1), [columns, inner]), out,
        pairs.tiles, pairs.num_tiles, pairs.tiles.shape[1], out.shape[1], rows.shape[1], GATED=gated, ROWS=pairs.height,
        COLUMNS=columns, INNER=inner, STAGES=stages, STORE=store_layout(TALL, columns) if is_tall else None,
        num_warps=8 if is_tall else 4, **pdl(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr):
    """counts[c, e] = how many pairs of chunk c chose expert e."""
    start_next_and_wait(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0)
    counts = tl.histogram(ids, EXPERTS, mask=pair < num_pairs)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def _place_between(tile, num_routed, num_shared, GROUP: tl.constexpr):
    """Return where a tile stands: groups of the `num_shared` last ones begin at even distances among the routed ones.

    Group g of G begins before routed tile floor(g R / G).
    """
    groups = tl.maximum((num_shared + GROUP - 1) // GROUP, 1)
    before = tl.minimum(((tile + 1) * groups - 1) // tl.maximum(num_routed, 1) + 1, groups) * GROUP  # shared ones
    shared = tile - num_routed
    return tl.where(
        tile < num_routed, tile + tl.minimum(before, num_shared), shared + shared // GROUP * num_routed // groups
    )


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_kernel(
    ids_ptr,
    counts_ptr,
    tokens_ptr,
    places_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    top_k,
    num_experts,
    num_shared,
    max_tiles,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program (e, c) places the pairs of chunk c that chose expert e; (e, 0) writes the expert's tiles as well."""
    start_next_and_wait(PDL)
    expert, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    each = tl.arange(0, EXPERTS)
    which = tl.arange(0, CHUNKS)
    counts = tl.load(
        counts_ptr + which[:, None] * EXPERTS + each[None, :], mask=(which < num_chunks)[:, None], other=0
    )  # fmt: skip
    totals = tl.sum(counts, axis=0)
    start = tl.sum(tl.where(each < expert, totals, 0), axis=0)
    before = tl.where((which < chunk)[:, None] & (each == expert)[None, :], counts, 0)
    place = start + tl.sum(tl.sum(before, axis=1), axis=0)

    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    place += tl.cumsum(mine, axis=0) - 1
    tl.store(tokens_ptr + place, pair // top_k, mask=mine > 0)
    tl.store(places_ptr + pair, place, mask=mine > 0)

    if chunk == 0:
        tiles = (totals + ROWS - 1) // ROWS
        first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
        own_tiles = tl.sum(tl.where(each == expert, tiles, 0), axis=0)
        end = start + tl.sum(tl.where(each == expert, totals, 0), axis=0)
        num_routed = tl.sum(tl.where(each < num_experts - num_shared, tiles, 0), axis=0)
        num_tiles = tl.sum(tiles, axis=0)
        step = tl.arange(0, 32)
        for tile in range(0, own_tiles, 32):
            real = tile + step < own_tiles
            between = _place_between(first_tile + tile + step, num_routed, num_tiles - num_routed, GROUP)
            target = tiles_ptr + between
            row = start + (tile + step) * ROWS
            tl.store(target, expert, mask=real)
            tl.store(target + max_tiles, row, mask=real)
            tl.store(target + 2 * max_tiles, tl.minimum(row + ROWS, end), mask=real)
        if expert == num_experts - 1:
            tl.store(num_tiles_ptr, num_tiles)


@triton.jit
def _gather_kernel(x_ptr, tokens_ptr, rows_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """rows[p] = x[tokens[p]]."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    values = tl.load(x_ptr + token * width + columns, mask=mask, other=0.0)
    tl.store(rows_ptr + row * width + columns, values, mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])
def _product_kernel(
    rows,
    weights,
    out_ptr,
    tiles_ptr,
    num_tiles_ptr,
    max_tiles,
    num_columns,
    width,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """out[row] = weight[expert] @ rows[row]; gated: silu of the first half's rows times the second's.

    rows, weights: descriptors, in blocks [ROWS, INNER] and [COLUMNS, INNER]. A block may reach beyond its expert's rows
    or columns: what is there is multiplied and not stored. Programs past the last tile return at once.
    """
    tl.assume(width > 0)  # else the compiler provides for sums without a product, and products wait for each other
    columns = (num_columns + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // columns
    first_column = (tl.program_id(0) % columns) * COLUMNS
    if tile < tl.load(num_tiles_ptr):
        row = tl.load(tiles_ptr + max_tiles + tile)
        end = tl.load(tiles_ptr + 2 * max_tiles + tile)
        block_row = tl.load(tiles_ptr + tile) * num_columns * (2 if GATED else 1) + first_column
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, INNER):
            x = rows.load([row, start])
            weight = weights.load([block_row, start])
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
            if GATED:
                weight_up = weights.load([block_row + num_columns, start])
                acc_up = tl.dot(x, tl.trans(weight_up), acc_up, input_precision="ieee")
        if GATED:
            acc = rounded_silu_mul(acc, acc_up, out_ptr.dtype.element_ty)
        at = row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        target = out_ptr + at.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(at < end)[:, None] & (column < num_columns)[None, :])
