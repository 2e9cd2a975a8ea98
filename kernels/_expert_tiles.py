"""Which (token, choice) pairs a tile of an expert's rows holds, found on the device.

Either one kernel places the pairs beforehand, or, where one tile holds all tokens there are, each tile finds its own.
"""

import torch

from specgen.kernels._triton import pdl, tl, triton, wait_for_inputs

_SCAN = 1024  # pairs a step when sorting by expert; four times that for many


def place_pairs(
    ids: torch.Tensor, num_experts: int, first: int, last: int, num_own: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (each tile's expert, -1 for none `[n] int32`; its pairs t * k + j, T * k for none `[n * height] int32`).

    ids: `[T, k] int32` in [0, num_experts). The tiles are those of the experts in [first, last), which `num_own` of the
    pairs have chosen, in order; n is the most there may be.
    """
    num_pairs = ids.numel()
    # Every expert in use adds at most one tile that isn't full.
    max_tiles = min(num_own, num_own // height + min(last - first, num_own))
    tile_expert = torch.empty(max_tiles, dtype=torch.int32, device=ids.device)
    tile_pairs = torch.empty(max_tiles * height, dtype=torch.int32, device=ids.device)
    # Fewer, wider steps for many.
    scan, warps = (4 * _SCAN, 8) if num_pairs > 8 * _SCAN else (_SCAN, 4)
    _place_kernel[(last - first + 1,)](
        ids, tile_expert, tile_pairs, num_pairs, first, last, max_tiles, ROWS=height, SCAN=scan,
        EXPERTS=triton.next_power_of_2(num_experts), num_warps=warps, **pdl(),
    )  # fmt: skip
    return tile_expert, tile_pairs


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _place_kernel(
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
def find_few(
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
