"""The experts for many tokens: rows sorted by expert, so that both operands of the products come in whole blocks.

A program takes one tile after the other (rows of one expert, columns of its weight). Blocks are fetched by warps of
their own while the others multiply, across the border of tiles, so that neither the reading of weights nor the end of a
tile interrupts the products. Sums run over the inner dimension in order, as in `moe_experts`: the bits are the same.
"""

import functools
from typing import NamedTuple

import torch

from specgen.kernels._triton import descriptor, pdl, tl, triton, wait_for_inputs

# Columns, inner, stages of the gated product (of each of its two) and of the second one.
_GATED = (128, 64, 3)
_DOWN = (256, 64, 3)
_ROWS = 128
_CHUNK = 2048  # pairs that one program counts, and sorts


class SortedPairs(NamedTuple):
    """(token, choice) pairs by expert, each expert's in order.

    tokens: [P] int32, the token of each sorted row. places: [P] int32, where pair t * k + j is. tiles: [3, n] int32, a
    tile's expert, first row and the row behind its last; num_tiles: [1] int32, how many of the n there are.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


@functools.cache
def _num_programs() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 3


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Return memory for the descriptors that programs make."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def sort_pairs(ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Return the pairs of `ids [T, k] int32` in [0, num_experts), sorted by expert."""
    num_pairs, device = ids.numel(), ids.device
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    max_tiles = num_pairs // _ROWS + min(num_experts, num_pairs)  # every expert in use: one that isn't full
    experts = triton.next_power_of_2(num_experts)
    counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=device)
    pairs = SortedPairs(
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(3, max_tiles, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    options = {"CHUNK": _CHUNK, "EXPERTS": experts, **pdl()}
    _count_kernel[(num_chunks,)](ids, counts, num_pairs, **options)
    _sort_kernel[(num_experts, num_chunks)](
        ids, counts, *pairs, num_pairs, ids.shape[1], num_experts, max_tiles, ROWS=_ROWS,
        CHUNKS=triton.next_power_of_2(num_chunks), **options,
    )  # fmt: skip
    return pairs


def sorted_products(x: torch.Tensor, pairs: SortedPairs, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every sorted row: [P, H] in x's dtype. Weights as in `moe_experts`."""
    rows = x.index_select(0, pairs.tokens)
    activated = torch.empty(len(rows), w2.shape[2], dtype=x.dtype, device=x.device)
    out = torch.empty_like(rows)
    triton.set_allocator(_allocate)
    for source, weights, target, (columns, inner, stages) in (
        (rows, w13, activated, _GATED),
        (activated, w2, out, _DOWN),
    ):
        _product_kernel[(_num_programs(),)](
            source, descriptor(weights.flatten(0, 1), [columns, inner]), target, pairs.tiles, pairs.num_tiles,
            pairs.tiles.shape[1], len(source), target.shape[1], source.shape[1],
            GATED=weights is w13, ROWS=_ROWS, COLUMNS=columns, INNER=inner, num_warps=4, num_stages=stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr):
    """counts[c, e] = how many pairs of chunk c chose expert e."""
    wait_for_inputs(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0)
    counts = tl.histogram(ids, EXPERTS, mask=pair < num_pairs)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


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
    max_tiles,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program (e, c) places the pairs of chunk c that chose expert e; (e, 0) writes the expert's tiles as well."""
    wait_for_inputs(PDL)
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
        step = tl.arange(0, 32)
        for tile in range(0, own_tiles, 32):
            real = tile + step < own_tiles
            target = tiles_ptr + first_tile + tile + step
            row = start + (tile + step) * ROWS
            tl.store(target, expert, mask=real)
            tl.store(target + max_tiles, row, mask=real)
            tl.store(target + 2 * max_tiles, tl.minimum(row + ROWS, end), mask=real)
        if expert == num_experts - 1:
            tl.store(num_tiles_ptr, first_tile + own_tiles)


@triton.jit(do_not_specialize=["max_tiles", "num_rows"])
def _product_kernel(
    rows_ptr,
    weights,
    out_ptr,
    tiles_ptr,
    num_tiles_ptr,
    max_tiles,
    num_rows,
    num_columns,
    width,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """out[row] = weight[expert] @ rows[row]; gated: silu of the first half's rows times the second's.

    weights: a descriptor, in blocks [COLUMNS, INNER]. A block may reach beyond its expert's rows or columns: what is
    there is multiplied and not stored.
    """
    # Made here: the compiler gives each of two groups of warps half of a tile's rows, and it can halve the blocks only
    # of a descriptor that doesn't come from the host.
    rows = tl.make_tensor_descriptor(rows_ptr, [num_rows, width], [width, 1], [ROWS, INNER])
    columns = (num_columns + COLUMNS - 1) // COLUMNS
    num_items = tl.load(num_tiles_ptr) * columns
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), warp_specialize=True):
        tile = item // columns
        first_column = (item % columns) * COLUMNS
        expert = tl.load(tiles_ptr + tile)
        row = tl.load(tiles_ptr + max_tiles + tile)
        end = tl.load(tiles_ptr + 2 * max_tiles + tile)
        block_row = expert * num_columns * (2 if GATED else 1) + first_column
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, width, INNER):
            x = rows.load([row, start])
            weight = weights.load([block_row, start])
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
            if GATED:
                weight_up = weights.load([block_row + num_columns, start])
                acc_up = tl.dot(x, tl.trans(weight_up), acc_up, input_precision="ieee")
        if GATED:  # rounded as two separate products would be
            acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
            acc_up = acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        at = row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        target = out_ptr + at.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(at < end)[:, None] & (column < num_columns)[None, :])
