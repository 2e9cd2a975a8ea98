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
from specgen.kernels._kv_cache import check_kv_cache
from specgen.kernels._mla_common import SUM_COLUMNS
from specgen.kernels._mla_plan import KEYS, Slab, plan_slabs
from specgen.kernels._tile_attention import attend, pad_heads, tile_queries
from specgen.kernels._tiles import find_tile
from specgen.kernels._triton import (
    can_use_tma,
    hopper_descriptor,
    is_hopper,
    launched,
    not_compiled,
    pdl,
    tl,
    triton,
    wait_for_inputs,
)
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
    shared |= {"REQUESTS": max(16, triton.next_power_of_2(num_requests)), **pdl()}  # fusion: loop and join round alike
    paged = {"KV_HEADS": num_kv_heads, "STEP_KEYS": _STEP_KEYS, "KEY_START": key_start}

    blocks = _hopper_blocks(q, kv_cache)
    rows = _TILE_ROWS if blocks is None else _HOPPER_ROWS
    tiles = _tiles_of(rows, num_tokens, num_requests, num_kv_heads, group)
    used_rows = tiles.heads * min(tiles.queries, max(max_query_len, 1))
    # Programs that share a tile's splits. The form for Hopper fills the device with one wave of them.
    sharing = splits if blocks is None and tiles.programs < _MANY_PROGRAMS else _MANY_PROGRAMS // tiles.programs
    splits_a_program = triton.cdiv(splits, max(1, min(sharing, splits)))
    scratch = tiles.programs * splits * used_rows * (dim + 4) * 4
    by_split = splits_a_program < splits and scratch <= _SCRATCH_BYTES
    if not by_split:
        splits_a_program = splits
    partials = torch.empty(scratch // 4, dtype=torch.float32, device=q.device) if by_split else out
    grid = (tiles.num_tiles, num_kv_heads * tiles.parts)
    kept = (partials, *sizes, splits, used_rows)
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
        _gqa_kernel[(*grid, splits if by_split else 1)](
            q, kv_cache, *step, out, *kept, scale_log2, ROWS=rows, HEAD_DIM=head_dim, BLOCK_SIZE=kv_cache.shape[1],
            BY_SPLIT=by_split, num_warps=4, num_stages=_STAGES_OVER_FLOAT8 if kv_cache.dtype == FLOAT8 else _STAGES,
            **tiles.constants(), **paged, **shared,
        )  # fmt: skip
    if by_split:
        _gqa_join_kernel[(*grid, used_rows)](
            *step[2:], out, *kept, scale_log2, HEAD_DIM=head_dim, num_warps=1, **tiles.constants(), **shared
        )
    return out


class _Tiles(NamedTuple):
    """How a step's rows are cut into tiles: heads of a group and queries a tile, parts of a group, their numbers."""

    heads: int
    queries: int
    parts: int
    num_tiles: int
    programs: int

    def constants(self) -> dict[str, int]:
        """Return what the kernels need to know of it."""
        return {"HEADS": self.heads, "PARTS": self.parts, "QUERIES": self.queries}


def _tiles_of(rows: int, num_tokens: int, num_requests: int, num_kv_heads: int, group: int) -> _Tiles:
    heads = min(group, rows)
    queries = rows // heads
    parts = triton.cdiv(group, heads)
    # Request b's tiles start at number query_start_loc[b] // queries + b: room enough for each, found without the host.
    num_tiles = num_tokens // queries + num_requests
    return _Tiles(heads, queries, parts, num_tiles, num_tiles * num_kv_heads * parts)


def _hopper_blocks(q: torch.Tensor, kv_cache: torch.Tensor) -> Any:
    """Return what the forms for Hopper fetch keys and values by; None where they do not apply."""
    block_size, width = kv_cache.shape[1:]
    fits = q.shape[2] in (64, 128) and block_size == _STEP_KEYS and kv_cache.dtype == q.dtype and q.itemsize == 2
    if not (fits and q.is_cuda and can_use_tma(kv_cache) and is_hopper()) or _FORM in not_compiled:
        return None
    return hopper_descriptor(kv_cache.view(-1, width), [block_size, q.shape[2]])


@triton.jit
def _gqa_step(
    start,
    end,
    q,
    row_max,
    row_sum,
    acc,
    positions,
    keys_ptr,
    values_offset,
    token_stride,
    table_ptr,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take in the keys start..start + STEP_KEYS. MASKED: some row may not see all of them, none sees one from `end` on.

    The maximum stays in raw units: exp2((score - max) * scale) is the same in the masked and the plain form.
    """
    key = start + tl.arange(0, STEP_KEYS)
    column = tl.arange(0, DIM)
    mask = (column < HEAD_DIM)[None, :]
    if MASKED:
        in_range = (key < end) & (key >= KEY_START)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        mask = mask & in_range[:, None]
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    rows = keys_ptr + (block * BLOCK_SIZE + key % BLOCK_SIZE) * token_stride
    keys = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    values = tl.load(rows[:, None] + values_offset + column[None, :], mask=mask, other=0.0).to(q.dtype)
    if MASKED:
        visible = in_range[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # A later query's value may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        values = tl.where(is_finite, values, 0.0).to(keys.dtype)
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    decay = tl.exp2((row_max - new_max) * scale_log2)
    weights = tl.exp2((scores - new_max[:, None]) * scale_log2).to(values.dtype)
    # By a product: its order is the same in every form, that of a reduction is the compiler's.
    ones = tl.full([STEP_KEYS, SUM_COLUMNS], 1.0, dtype=values.dtype)
    row_sum = tl.dot(weights, ones, row_sum * decay[:, None], input_precision="ieee")
    acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _join(total_max, total, result, part_max, part_sum, part, scale_log2):
    """Return the running (max, sum, acc) with one more split's taken in."""
    new_max = tl.maximum(total_max, part_max)
    decay = tl.exp2((total_max - new_max) * scale_log2)
    weight = tl.exp2((part_max - new_max) * scale_log2)
    return new_max, total * decay + part_sum * weight, result * decay[:, None] + part * weight[:, None]


@triton.jit(do_not_specialize=["num_requests", "splits", "used_rows"])
def _gqa_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    block_tables_stride,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    num_requests,
    num_heads,
    splits,
    used_rows,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BY_SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    KEY_START: tl.constexpr,
    NO_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile's rows against all keys, or BY_SPLIT against one split's: then its partial (acc, max, sum) is kept.

    Partials have room for a tile's first used_rows rows and `splits` splits.
    """
    wait_for_inputs(PDL)
    slot, q_row, count, position = find_tile(
        tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    num_keys = tl.where(slot >= 0, position + count, 0)
    first_split = tl.program_id(2)
    if (count > 0) & ((first_split * SPLIT_KEYS < num_keys) | (not BY_SPLIT)):
        row = tl.arange(0, ROWS)
        kv_head = tl.program_id(1) // PARTS
        in_group = (tl.program_id(1) % PARTS) * HEADS + row % HEADS
        query = row // HEADS
        real = (in_group < GROUP) & (query < count)
        column = tl.arange(0, DIM)
        result_row = (q_row + query) * num_heads + kv_head * GROUP + in_group
        mask = real[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + result_row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        positions = position + query
        table_ptr = block_tables_ptr + tl.maximum(slot, 0) * block_tables_stride
        keys_ptr = cache_ptr + kv_head * HEAD_DIM
        token_stride = 2 * KV_HEADS * HEAD_DIM
        values_offset = KV_HEADS * HEAD_DIM

        total_max = tl.full([ROWS], NO_MAX, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        result = tl.zeros([ROWS, DIM], dtype=tl.float32)
        last_split = first_split + 1
        if not BY_SPLIT:
            last_split = (num_keys + SPLIT_KEYS - 1) // SPLIT_KEYS
        for split in range(first_split, last_split):
            low = split * SPLIT_KEYS
            end = tl.minimum(low + SPLIT_KEYS, num_keys)
            row_max = tl.full([ROWS], NO_MAX, dtype=tl.float32)
            row_sum = tl.zeros([ROWS, SUM_COLUMNS], dtype=tl.float32)
            acc = tl.zeros([ROWS, DIM], dtype=tl.float32)
            # [low, lead): keys before KEY_START among them; [lead, full): every row sees all; [full, end): causal edge.
            lead = low
            if KEY_START > 0:
                lead = tl.minimum(tl.maximum((KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS, low), end)
                for start in range(low, lead, STEP_KEYS):
                    row_max, row_sum, acc = _gqa_step(
                        start, end, q, row_max, row_sum, acc, positions, keys_ptr, values_offset, token_stride,
                        table_ptr, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, True,
                    )  # fmt: skip
            full = tl.maximum(tl.minimum((position + 1) // STEP_KEYS, end // STEP_KEYS) * STEP_KEYS, lead)
            for start in range(lead, full, STEP_KEYS):
                row_max, row_sum, acc = _gqa_step(
                    start, end, q, row_max, row_sum, acc, positions, keys_ptr, values_offset, token_stride,
                    table_ptr, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, False,
                )  # fmt: skip
            for start in range(full, end, STEP_KEYS):
                row_max, row_sum, acc = _gqa_step(
                    start, end, q, row_max, row_sum, acc, positions, keys_ptr, values_offset, token_stride,
                    table_ptr, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, True,
                )  # fmt: skip
            split_sum = tl.max(row_sum, axis=1)  # its columns are equal
            if BY_SPLIT:
                total_max, total, result = row_max, split_sum, acc
            else:
                total_max, total, result = _join(total_max, total, result, row_max, split_sum, acc, scale_log2)

        if BY_SPLIT:
            place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * splits
            partial = partial_ptr + ((place + first_split) * used_rows + row) * (DIM + 4)
            tl.store(partial[:, None] + column[None, :], result, mask=real[:, None])
            tl.store(partial + DIM, total_max, mask=real)
            tl.store(partial + DIM + 1, total, mask=real)
        else:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            target = out_ptr + result_row[:, None] * HEAD_DIM + column[None, :]
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "splits", "used_rows"])
def _gqa_join_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    num_requests,
    num_heads,
    splits,
    used_rows,
    scale_log2,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
    NO_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join one row's partial results, first split first."""
    wait_for_inputs(PDL)
    row = tl.program_id(2)
    in_group = (tl.program_id(1) % PARTS) * HEADS + row % HEADS
    query = row // HEADS
    slot, q_row, count, position = find_tile(
        tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    if (query < count) & (in_group < GROUP):
        column = tl.arange(0, DIM)
        first_place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * splits
        total_max = tl.full([1], NO_MAX, dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        result = tl.zeros([1, DIM], dtype=tl.float32)
        # The tile's last row may see one split more; it gives this row nothing.
        num_keys = tl.where(slot >= 0, position + count, 0)
        for split in tl.range(0, (num_keys + SPLIT_KEYS - 1) // SPLIT_KEYS, num_stages=4):
            partial = partial_ptr + ((first_place + split) * used_rows + row) * (DIM + 4)
            part = tl.load(partial + column)[None, :]
            part_max = tl.load(partial + DIM + tl.zeros([1], dtype=tl.int32))
            part_sum = tl.load(partial + DIM + 1 + tl.zeros([1], dtype=tl.int32))
            total_max, total, result = _join(total_max, total, result, part_max, part_sum, part, scale_log2)
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        head = (tl.program_id(1) // PARTS) * GROUP + in_group
        target = out_ptr + ((q_row + query) * num_heads + head) * HEAD_DIM
        tl.store(target + column[None, :], result.to(out_ptr.dtype.element_ty), mask=(column < HEAD_DIM)[None, :])
