"""Paged, causal multi-head latent attention in absorbed form: queries against the cached latents themselves.

A row (one query token, all heads) has one arithmetic whether it comes as decode, verification or prefill chunk: tiles
of a fixed number of query rows, keys in a fixed order of chunks counted from position 0, running softmax in float32. A
chunk that a row can't see changes nothing in it (factor 1, sum + 0), so neighbours, chunking, padding and block
placement don't reach its bits. Unwritten slots may hold NaN: keys outside a row's range are masked, and their values
cleared, before they are multiplied. On CUDA a long context is cut into splits of a fixed number of keys, whose partial
results are joined in their order; one split gives the same bits as a join of one, so the bound `max_seq_len` doesn't
matter either. Measured on the CPU (AVX-512, 1 and 2 threads): bmm's item bits depend neither on the number of items nor
on the row's place.
"""

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._mla_plan import KEYS, Slab, plan_slabs
from specgen.kernels._triton import tl, triton
from specgen.kernels.linear import item_product, rows_keep_bits

_CPU_QUERIES = 4  # query tokens a tile
# On CUDA: rows of a tile (queries x heads), keys a step, keys of a split. Never a function of the batch.
_TILE_ROWS = 64
_STEP_KEYS = 64
_SPLIT_KEYS = 512
_SCRATCH_BYTES = 256 << 20  # partial results held at once; a longer step runs in several launches
_LOG2_E = 1.4426950408889634
_NO_MAX = -1.0e30  # running maximum before the first key: finite, so that exp(max - max) is 1 and never NaN


def mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return every query's softmax-weighted sum of the latents it may see.

    q: [T, H, R + P], contiguous; kv_cache: [num_blocks, block_size, R + P], same dtype, the first R columns are the
    values; block_tables: [slots, MB] int32; idx_mapping: [B] int32 (request -> slot, -1 padded); query_start_loc: [B +
    1] int32; seq_lens: [B] int32. Query token i of request b sits at position seq_lens[b] - query_len + i and sees the
    keys key_start..position. scale > 0 multiplies the scores; max_query_len and max_seq_len bound the step from the
    host.
    Returns [T, H, R] in q's dtype; zeros for rows without a visible key, padded requests and tokens past the last
    request.
    Raises: ValueError on a wrong dtype or shape.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """
    num_requests = idx_mapping.shape[0]
    check("q", q, q.dtype, None, None, None)
    check("kv_cache", kv_cache, q.dtype, None, None, q.shape[2])
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
    if not q.is_contiguous() or not kv_cache.is_contiguous():
        raise ValueError("q and kv_cache: expected contiguous tensors")
    if not 0 < kv_lora_rank <= q.shape[2]:
        raise ValueError(f"kv_lora_rank: expected 1..{q.shape[2]}, got {kv_lora_rank}")
    return (mla_attention_triton if q.is_cuda else mla_attention_torch)(
        q,
        kv_cache,
        block_tables,
        idx_mapping,
        query_start_loc,
        seq_lens,
        kv_lora_rank,
        scale,
        max_query_len,
        max_seq_len,
        key_start,
    )


def mla_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `mla_attention` returns, in plain torch: many tiles at once, their chunks one after the other."""
    num_heads, width = q.shape[1:]
    block_size = kv_cache.shape[1]
    queries = _CPU_QUERIES if _tile_rows_keep_bits(_CPU_QUERIES * num_heads, width, kv_lora_rank) else 1
    out = q.new_zeros(q.shape[0], num_heads, kv_lora_rank)
    slots = idx_mapping.numpy()
    if not len(slots):
        return out
    num_blocks = -(-max(int(seq_lens.max()), 1) // block_size)
    tables = block_tables.numpy()[np.maximum(slots, 0), :num_blocks]
    slabs = plan_slabs(
        (slots >= 0).tobytes(),
        query_start_loc.numpy().tobytes(),
        seq_lens.numpy().tobytes(),
        tables.tobytes(),
        block_size,
        queries,
        key_start,
    )
    for slab in slabs:
        rows = _attend(q, kv_cache.view(-1, width), slab, kv_lora_rank, scale)
        if slab.used is not None:
            rows = rows.index_select(0, slab.used)
        out.index_copy_(0, slab.out_rows, rows.to(q.dtype))
    return out


def _tile_rows_keep_bits(rows: int, width: int, rank: int) -> bool:
    """Whether both products of a tile give a row the same bits wherever it stands in the tile."""
    return rows_keep_bits(rows, width, KEYS, True, torch.float32) and rows_keep_bits(
        rows, KEYS, rank, False, torch.float32
    )


def _attend(q: torch.Tensor, cache: torch.Tensor, slab: Slab, kv_lora_rank: int, scale: float) -> torch.Tensor:
    """Return the results of a slab's tiles [n * Q, H, R] float32. cache: [slots, R + P]."""
    num_heads, width = q.shape[1:]
    queries = len(slab.token_rows) // slab.num_tiles
    q_tiles = q.index_select(0, slab.token_rows).float().mul_(scale).view(slab.num_tiles, queries * num_heads, width)
    for i, chunk in enumerate(slab.chunks):
        active = chunk.active
        keys = cache.index_select(0, chunk.slots).float()
        if chunk.mixed is not None:
            # Such a key may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
            keys.index_copy_(0, chunk.mixed, keys.index_select(0, chunk.mixed).nan_to_num_(0.0, 0.0, 0.0))
        keys = keys.view(-1, KEYS, width).expand(active, -1, -1)
        scores = item_product(q_tiles[:active], keys.transpose(1, 2))
        if chunk.hidden is not None:
            by_query = scores.view(active, queries, num_heads, KEYS)
            by_query.masked_fill_(chunk.hidden, float("-inf"))
        chunk_max = scores.amax(-1, keepdim=True)
        if i == 0:
            row_max = chunk_max.clamp_(min=_NO_MAX)
            weights = scores.sub_(row_max).exp_()
            row_sum = weights.sum(-1, keepdim=True)
            acc = item_product(weights, keys[..., :kv_lora_rank])
            continue
        new_max = torch.maximum(row_max[:active], chunk_max)
        decay = (row_max[:active] - new_max).exp_()
        weights = scores.sub_(new_max).exp_()
        row_sum[:active].mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc[:active].mul_(decay).add_(item_product(weights, keys[..., :kv_lora_rank]))
        row_max[:active] = new_max
    acc.div_(row_sum)
    if slab.has_empty_rows:
        acc.masked_fill_(row_sum == 0, 0.0)
    return acc.view(-1, num_heads, kv_lora_rank)


def mla_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `mla_attention` returns, by one program a query tile, group of heads and split of the keys."""
    num_tokens, num_heads, width = q.shape
    num_requests = idx_mapping.shape[0]
    out = q.new_zeros(num_tokens, num_heads, kv_lora_rank)
    if num_tokens == 0 or num_requests == 0:
        return out
    heads = min(triton.next_power_of_2(num_heads), _TILE_ROWS)
    queries = _TILE_ROWS // heads
    rank = max(16, triton.next_power_of_2(kv_lora_rank))
    head_groups = triton.cdiv(num_heads, heads)
    splits = max(1, triton.cdiv(max_seq_len, _SPLIT_KEYS))
    # Request b's tiles start at number query_start_loc[b] // queries + b: room enough for each, found without the host.
    num_tiles = num_tokens // queries + num_requests
    tile_bytes = head_groups * splits * _TILE_ROWS * (rank + 2) * 4
    tiles_a_launch = num_tiles if splits == 1 else max(1, min(num_tiles, _SCRATCH_BYTES // tile_bytes))
    partial = out
    if splits > 1:
        partial = torch.empty(tile_bytes // 4 * tiles_a_launch, dtype=torch.float32, device=q.device)
    shared = {
        "HEADS": heads,
        "QUERIES": queries,
        "RANK": rank,
        "SPLIT_KEYS": _SPLIT_KEYS,
        "SEARCH": num_requests.bit_length(),
        "SPLITS": splits,
    }
    for first_tile in range(0, num_tiles, tiles_a_launch):
        grid_tiles = min(tiles_a_launch, num_tiles - first_tile)
        _mla_split_kernel[(grid_tiles, head_groups, splits)](
            q,
            kv_cache,
            block_tables,
            block_tables.stride(0),
            idx_mapping,
            query_start_loc,
            seq_lens,
            out,
            partial,
            first_tile,
            num_requests,
            num_heads,
            kv_lora_rank,
            width - kv_lora_rank,
            scale * _LOG2_E,
            BLOCK_SIZE=kv_cache.shape[1],
            ROPE=max(16, triton.next_power_of_2(width - kv_lora_rank)),
            STEP_KEYS=_STEP_KEYS,
            KEY_START=key_start,
            NO_MAX=_NO_MAX,
            num_warps=8,
            num_stages=2,
            **shared,
        )
        if splits > 1:
            _mla_join_kernel[(grid_tiles, head_groups, _TILE_ROWS)](
                idx_mapping,
                query_start_loc,
                seq_lens,
                partial,
                out,
                first_tile,
                num_requests,
                num_heads,
                kv_lora_rank,
                scale * _LOG2_E,
                NO_MAX=_NO_MAX,
                num_warps=4,
                **shared,
            )
    return out


@triton.jit
def _find_tile(
    tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES: tl.constexpr, SEARCH: tl.constexpr
):
    """Return a tile's (slot, first row of q, number of queries (0: no such tile), first position)."""
    low = 0
    high = num_requests
    for _ in tl.static_range(SEARCH):
        # The last request whose tiles start at or before this one; low stays below high.
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle) // QUERIES + middle
        here = (start <= tile) & (middle < high)
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    request = low
    row = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - row
    offset = (tile - (row // QUERIES + request)) * QUERIES
    slot = tl.load(idx_mapping_ptr + request)
    count = tl.where(slot >= 0, tl.minimum(tl.maximum(query_len - offset, 0), QUERIES), 0)
    position = tl.load(seq_lens_ptr + request) - query_len + offset
    return slot.to(tl.int64), (row + offset).to(tl.int64), count, position


@triton.jit
def _mla_step(
    start,
    end,
    q_latent,
    q_rope,
    row_max,
    row_sum,
    acc,
    positions,
    cache_ptr,
    table_ptr,
    rank,
    rope_width,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take in the keys start..start + STEP_KEYS. MASKED: some row may not see all of them, none sees one from `end` on.

    The maximum stays in raw units: exp2((score - max) * scale) leaves nothing to contract into a fused multiply-add,
    which would give the masked and the plain form other bits.
    """
    key = start + tl.arange(0, STEP_KEYS)
    latent_column = tl.arange(0, RANK)
    rope_column = tl.arange(0, ROPE)
    if MASKED:
        in_range = (key < end) & (key >= KEY_START)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    cache_row = cache_ptr + (block * BLOCK_SIZE + key % BLOCK_SIZE) * (rank + rope_width)
    latent_mask = (latent_column < rank)[None, :]
    rope_mask = (rope_column < rope_width)[None, :]
    if MASKED:
        latent_mask = latent_mask & in_range[:, None]
        rope_mask = rope_mask & in_range[:, None]
    latent = tl.load(cache_row[:, None] + latent_column[None, :], mask=latent_mask, other=0.0)
    rope = tl.load(cache_row[:, None] + rank + rope_column[None, :], mask=rope_mask, other=0.0)
    if MASKED:
        # A later query's key may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
        is_finite = tl.abs(latent.to(tl.float32)) < float("inf")
        latent = tl.where(is_finite, latent, 0.0).to(cache_ptr.dtype.element_ty)
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    if MASKED:
        visible = in_range[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    decay = tl.exp2((row_max - new_max) * scale_log2)
    weights = tl.exp2((scores - new_max[:, None]) * scale_log2)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def _mla_split_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    block_tables_stride,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    first_tile,
    num_requests,
    num_heads,
    rank,
    rope_width,
    scale_log2,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SEARCH: tl.constexpr,
    KEY_START: tl.constexpr,
    NO_MAX: tl.constexpr,
):
    """One tile's rows against one split's keys: the result, or with several splits its partial (acc, max, sum)."""
    split = tl.program_id(2)
    slot, q_row, count, position = _find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    low = split * SPLIT_KEYS
    end = tl.minimum(low + SPLIT_KEYS, position + count)
    if (count > 0) & (low < end):
        ROWS: tl.constexpr = HEADS * QUERIES
        row = tl.arange(0, ROWS)
        head = tl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        real = (head < num_heads) & (query < count)
        latent_column = tl.arange(0, RANK)
        rope_column = tl.arange(0, ROPE)
        result_row = (q_row + query) * num_heads + head
        q_rows = q_ptr + result_row[:, None] * (rank + rope_width)
        q_latent = tl.load(
            q_rows + latent_column[None, :], mask=real[:, None] & (latent_column < rank)[None, :], other=0.0
        )
        q_rope = tl.load(
            q_rows + rank + rope_column[None, :], mask=real[:, None] & (rope_column < rope_width)[None, :], other=0.0
        )
        positions = position + query
        table_ptr = block_tables_ptr + slot * block_tables_stride
        row_max = tl.full([ROWS], NO_MAX, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, RANK], dtype=tl.float32)

        # [low, lead): keys before KEY_START among them; [lead, full): every row sees all; [full, end): the causal edge.
        lead = low
        if KEY_START > 0:
            lead = tl.minimum(tl.maximum((KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS, low), end)
        full = tl.maximum(tl.minimum((position + 1) // STEP_KEYS * STEP_KEYS, end // STEP_KEYS * STEP_KEYS), lead)
        if KEY_START > 0:
            for start in range(low, lead, STEP_KEYS):
                row_max, row_sum, acc = _mla_step(
                    start, end, q_latent, q_rope, row_max, row_sum, acc, positions, cache_ptr, table_ptr, rank,
                    rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, True,
                )  # fmt: skip
        for start in range(lead, full, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, q_latent, q_rope, row_max, row_sum, acc, positions, cache_ptr, table_ptr, rank,
                rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, False,
            )  # fmt: skip
        for start in range(full, end, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, q_latent, q_rope, row_max, row_sum, acc, positions, cache_ptr, table_ptr, rank,
                rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, True,
            )  # fmt: skip

        if SPLITS == 1:
            result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            target = out_ptr + result_row[:, None] * rank + latent_column[None, :]
            mask = real[:, None] & (latent_column < rank)[None, :]
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SPLITS + split
            partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
            tl.store(partial[:, None] + latent_column[None, :], acc)
            tl.store(partial + RANK, row_max)
            tl.store(partial + RANK + 1, row_sum)


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def _mla_join_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    partial_ptr,
    out_ptr,
    first_tile,
    num_requests,
    num_heads,
    rank,
    scale_log2,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SEARCH: tl.constexpr,
    NO_MAX: tl.constexpr,
):
    """Join one row's partial results, first split first."""
    row = tl.program_id(2)
    head = tl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    _, q_row, count, position = _find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    if (query < count) & (head < num_heads) & (position + query >= 0):
        column = tl.arange(0, RANK)
        first_place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SPLITS
        total_max = tl.full([1], NO_MAX, dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        acc = tl.zeros([RANK], dtype=tl.float32)
        for split in range(0, (position + query) // SPLIT_KEYS + 1):
            partial = partial_ptr + ((first_place + split) * (HEADS * QUERIES) + row) * (RANK + 2)
            part_max = tl.load(partial + RANK)
            part_sum = tl.load(partial + RANK + 1)
            new_max = tl.maximum(total_max, part_max)
            decay = tl.exp2((total_max - new_max) * scale_log2)
            weight = tl.exp2((part_max - new_max) * scale_log2)
            total = total * decay + part_sum * weight
            acc = acc * decay + tl.load(partial + column) * weight
            total_max = new_max
        result = acc / tl.where(total > 0, total, 1.0)
        target = out_ptr + ((q_row + query) * num_heads + head) * rank
        tl.store(target + column, result.to(out_ptr.dtype.element_ty), mask=column < rank)
