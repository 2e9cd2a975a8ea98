"""Paged, causal grouped-query attention: several query heads share one key head and one value head.

A row (one query token of one head) has one arithmetic whether it comes as decode, verification or prefill chunk, as in
`mla_attention`: tiles of a fixed number of rows, keys in a fixed order of chunks counted from position 0, softmax in
float32; keys that a row can't see change nothing in it. On CUDA the softmax runs along with the keys, and these are
cut into splits of a fixed number, each summed from nothing, and the splits' results are joined in their order. Few
tiles give each split a program and are joined by a second kernel, many tiles loop over their splits: the same
operations in the same order, none of them contracted, so the choice is one of speed. On Hopper `_gqa_hopper` does the
same in larger tiles, to the bit. Unwritten slots may hold NaN: keys outside a row's range are masked, and their values
cleared, before they are multiplied.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._gqa_hopper import gqa_hopper_kernel
from specgen.kernels._gqa_splits import gqa_join_kernel, gqa_kernel
from specgen.kernels._kv_cache import check_kv_cache
from specgen.kernels._mla_plan import KEYS, Slab, plan_slabs
from specgen.kernels._tile_attention import attend, pad_heads, tile_queries
from specgen.kernels._tiles import looked_at
from specgen.kernels._triton import can_use_tma, hopper_descriptor, is_hopper, launched, not_compiled, pdl, triton
from specgen.kernels.float8_linear import FLOAT8

# On CUDA: rows of a tile (queries x heads of a group), keys a step, keys of a split; these two show in the bits.
_TILE_ROWS = 32
_STEP_KEYS = 64
_SPLIT_KEYS = 256
_STAGES = 3
_STAGES_OVER_FLOAT8 = 2  # registers hold the widened keys, and a third stage spills
_MANY_PROGRAMS = 264  # so many tiles fill the device (twice 132 processors) without a program a split
# In the form for Hopper: rows of a tile (128 were slower, in one group of warps or two), and stages of the rings.
_HOPPER_ROWS = 64
_HOPPER_STAGES = 2
_FORM = "grouped-query attention"  # for the log
_SCRATCH_BYTES = 256 << 20  # partial results held at once; a longer step loops over its splits
_LOG2_E = 1.4426950408889634
_NO_MAX = -1.0e30  # running maximum before the first key: finite, so that exp(max - max) is 1 and never NaN


def gqa_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return every query head's softmax-weighted sum of the values it may see.

    q: [T, Hq, D], contiguous, head h reads key head h // (Hq / Hkv); kv_cache: [num_blocks, block_size, 2 Hkv D], same
    dtype or FP8, a token's key heads, then its value heads; block_tables: [slots, MB] int32; idx_mapping: [B] int32
    (request -> slot, -1 padded); query_start_loc: [B + 1] int32; seq_lens: [B] int32. Query token i of request b sits
    at position seq_lens[b] - query_len + i and sees the keys key_start..position. scale > 0 multiplies the scores;
    max_query_len and max_seq_len bound the step from the host.
    Returns [T, Hq, D] in q's dtype; zeros for rows without a visible key and for padded requests. Rows past the last
    request may hold anything.
    Raises: ValueError on a wrong dtype or shape.
    Source: Ainslie et al., arXiv 2305.13245.
    """
    num_requests = idx_mapping.shape[0]
    check("q", q, q.dtype, None, None, None)
    check_kv_cache(kv_cache, q.dtype, 2 * num_kv_heads * q.shape[2])
    check("block_tables", block_tables, torch.int32, None, None)
    check("idx_mapping", idx_mapping, torch.int32, num_requests)
    check("query_start_loc", query_start_loc, torch.int32, num_requests + 1)
    check("seq_lens", seq_lens, torch.int32, num_requests)
    check_same_device(
        q=q,
        kv_cache=kv_cache,
        block_tables=block_tables,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    if not q.is_contiguous():
        raise ValueError("q: expected a contiguous tensor")
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(f"num_kv_heads: {q.shape[1]} query heads can't share {num_kv_heads} key heads")
    return (gqa_attention_triton if q.is_cuda else gqa_attention_torch)(
        q,
        kv_cache,
        block_tables,
        idx_mapping,
        query_start_loc,
        seq_lens,
        num_kv_heads,
        scale,
        max_query_len,
        max_seq_len,
        key_start,
    )


def gqa_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `gqa_attention` returns, in plain torch: many tiles and their chunks at once."""
    num_heads, head_dim = q.shape[1:]
    group, block_size = num_heads // num_kv_heads, kv_cache.shape[1]
    queries = tile_queries(group, head_dim, head_dim, max_query_len)
    out = torch.zeros_like(q)
    slots = idx_mapping.numpy()
    if not len(slots):
        return out
    num_blocks = -(-max(int(seq_lens.max()), 1) // block_size)
    slabs = plan_slabs(
        (slots >= 0).tobytes(),
        query_start_loc.numpy().tobytes(),
        seq_lens.numpy().tobytes(),
        block_tables.numpy()[np.maximum(slots, 0), :num_blocks].tobytes(),
        block_size,
        queries,
        key_start,
    )
    cache = kv_cache.view(-1, head_dim)  # 2 Hkv rows a slot
    for slab in slabs:
        rows = q.index_select(0, slab.token_rows).float().mul_(scale)
        tiles = rows.view(slab.num_tiles, queries, num_kv_heads, group, head_dim).transpose(1, 2)
        # Tiles that share their keys take the key heads one by one: a key then needs no copy for each tile.
        parts = [(tiles, 0)] if not slab.shared else [(tiles[:, h : h + 1], h) for h in range(num_kv_heads)]
        done = [_attend_heads(part, cache, slab, h, 2 * num_kv_heads) for part, h in parts]
        rows = (done[0] if len(done) == 1 else torch.cat(done, 1)).transpose(1, 2).reshape(-1, num_heads, head_dim)
        if slab.used is not None:
            rows = rows.index_select(0, slab.used)
        out.index_copy_(0, slab.out_rows, rows.to(q.dtype))
    return out


def _attend_heads(q: torch.Tensor, cache: torch.Tensor, slab: Slab, first_head: int, stride: int) -> torch.Tensor:
    """Return the results of a slab's tiles [n, h, Q, G, D] float32.

    q: [n, h, Q, G, D] for the h key heads from `first_head` on; cache: [slots * stride, D], `stride` rows a slot.
    """
    num_tiles, heads, queries, group, head_dim = q.shape
    tiles = pad_heads(q, queries)
    key_rows = slab.cache_rows.get((first_head, heads, stride))
    if key_rows is None:
        head = torch.arange(first_head, first_head + heads)[:, None]
        key_rows = (slab.slots.view(-1, 1, KEYS) * stride + head).flatten()
        slab.cache_rows[first_head, heads, stride] = key_rows
    keys = cache.index_select(0, key_rows).float().view(-1, heads, KEYS, head_dim)
    values = cache[stride // 2 :].index_select(0, key_rows).float().view(-1, heads, KEYS, head_dim)
    if slab.mixed is not None:
        # Such a value may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
        mixed_rows = slab.cache_rows.get((heads,))
        if mixed_rows is None:
            by_key = (slab.mixed // KEYS * heads)[:, None] + torch.arange(heads)
            mixed_rows = slab.cache_rows[(heads,)] = (by_key * KEYS + (slab.mixed % KEYS)[:, None]).flatten()
        flat = values.view(-1, head_dim)
        flat.index_copy_(0, mixed_rows, flat.index_select(0, mixed_rows).nan_to_num_(0.0, 0.0, 0.0))
    out = attend(tiles.reshape(num_tiles, heads, -1, head_dim), keys, values, slab).view(tiles.shape)
    return out[..., :group, :]


def gqa_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `gqa_attention` returns, by one program a query tile and group of heads, or one for some splits."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests, group = idx_mapping.shape[0], num_heads // num_kv_heads
    out = torch.empty_like(q)
    if num_tokens == 0 or num_requests == 0:
        return out
    step = (block_tables, block_tables.stride(0), idx_mapping, query_start_loc, seq_lens)
    splits = max(1, triton.cdiv(max_seq_len, _SPLIT_KEYS))
    dim = max(16, triton.next_power_of_2(head_dim))
    sizes = (num_requests, num_heads)
    scale_log2 = scale * _LOG2_E
    shared = {"GROUP": group, "SPLIT_KEYS": _SPLIT_KEYS, "NO_MAX": _NO_MAX, "DIM": dim, "enable_fp_fusion": False}
    shared |= {"REQUESTS": looked_at(num_requests), **pdl()}  # fusion: loop and join round alike
    paged = {"KV_HEADS": num_kv_heads, "STEP_KEYS": _STEP_KEYS, "KEY_START": key_start}

    blocks = _hopper_blocks(q, kv_cache)
    rows = _TILE_ROWS if blocks is None else _HOPPER_ROWS
    tiles = _tiles_of(rows, num_tokens, num_requests, num_kv_heads, group, max_query_len)
    splits_a_program, num_partials = _share_splits(splits, tiles, dim + 4, on_hopper=blocks is not None)
    by_split = num_partials > 0
    partials = torch.empty(num_partials, dtype=torch.float32, device=q.device) if by_split else out
    grid = (tiles.num_tiles, num_kv_heads * tiles.parts)
    kept = (partials, *sizes, splits, tiles.used_rows)
    if blocks is not None:
        if not launched(
            _FORM,
            partial(
                gqa_hopper_kernel[(*grid, triton.cdiv(splits, splits_a_program))],
                q, blocks, *step, out, *kept, splits_a_program, scale_log2, ROWS=rows, STAGES=_HOPPER_STAGES,
                BY_SPLIT=by_split, num_warps=rows // 16, **tiles.constants(), **paged, **shared,
            ),
        ):  # fmt: skip
            return gqa_attention_triton(
                q, kv_cache, *step[:1], *step[2:], num_kv_heads, scale, max_query_len, max_seq_len, key_start
            )
    else:
        gqa_kernel[(*grid, splits if by_split else 1)](
            q, kv_cache, *step, out, *kept, scale_log2, ROWS=rows, HEAD_DIM=head_dim, BLOCK_SIZE=kv_cache.shape[1],
            BY_SPLIT=by_split, num_warps=4, num_stages=_STAGES_OVER_FLOAT8 if kv_cache.dtype == FLOAT8 else _STAGES,
            **tiles.constants(), **paged, **shared,
        )  # fmt: skip
    if by_split:
        gqa_join_kernel[(*grid, tiles.used_rows)](
            *step[2:], out, *kept, scale_log2, HEAD_DIM=head_dim, num_warps=1, **tiles.constants(), **shared
        )
    return out


class _Tiles(NamedTuple):
    """How a step's rows are cut into tiles: heads of a group and queries a tile, parts of a group, their numbers.

    used_rows: of a tile, those that a query of this step may be in.
    """

    heads: int
    queries: int
    parts: int
    num_tiles: int
    programs: int
    used_rows: int

    def constants(self) -> dict[str, int]:
        """Return what the kernels need to know of it."""
        return {"HEADS": self.heads, "PARTS": self.parts, "QUERIES": self.queries}


def _tiles_of(
    rows: int, num_tokens: int, num_requests: int, num_kv_heads: int, group: int, max_query_len: int
) -> _Tiles:
    heads = min(group, rows)
    queries = rows // heads
    parts = triton.cdiv(group, heads)
    # Request b's tiles start at number query_start_loc[b] // queries + b: room enough for each, found without the host.
    num_tiles = num_tokens // queries + num_requests
    used_rows = heads * min(queries, max(max_query_len, 1))
    return _Tiles(heads, queries, parts, num_tiles, num_tiles * num_kv_heads * parts, used_rows)


def _share_splits(splits: int, tiles: _Tiles, width: int, on_hopper: bool) -> tuple[int, int]:
    """Return (splits a program takes, numbers of their partial results): all of them and 0 if they are not shared.

    width: numbers of a row's partial result.
    """
    # Programs that share a tile's splits. The form for Hopper fills the device with one wave of them.
    sharing = splits if not on_hopper and tiles.programs < _MANY_PROGRAMS else _MANY_PROGRAMS // tiles.programs
    splits_a_program = triton.cdiv(splits, max(1, min(sharing, splits)))
    num_partials = tiles.programs * splits * tiles.used_rows * width
    if splits_a_program == splits or 4 * num_partials > _SCRATCH_BYTES:
        return splits, 0
    return splits_a_program, num_partials


def _hopper_blocks(q: torch.Tensor, kv_cache: torch.Tensor) -> Any:
    """Return what the forms for Hopper fetch keys and values by; None where they do not apply."""
    block_size, width = kv_cache.shape[1:]
    fits = q.shape[2] in (64, 128) and block_size == _STEP_KEYS and kv_cache.dtype == q.dtype and q.itemsize == 2
    if not (fits and q.is_cuda and can_use_tma(kv_cache) and is_hopper()) or _FORM in not_compiled:
        return None
    return hopper_descriptor(kv_cache.view(-1, width), [block_size, q.shape[2]])
