"""Grouped-query attention by Triton: a tile's rows against the keys, split by split, and the join of splits' results.

The steps and their order are what `_gqa_hopper` does too; its splits' results are joined by the same kernel. How a step
of the engine is cut into tiles and splits, and whether a program takes one split or all, is for `gqa_attention` to say.
"""

# mypy: ignore-errors

from specgen.kernels._mla_common import SUM_COLUMNS, take_in
from specgen.kernels._tiles import find_tile, head_rows, real_rows, tile_place
from specgen.kernels._triton import tl, triton, wait_for_inputs


@triton.jit
def _gqa_step(
    start,
    end,
    row_max,
    row_sum,
    acc,
    q,
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
    """Take in the keys start..start + STEP_KEYS. MASKED: some row may not see all of them, none one from `end` on."""
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
    return take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS)


@triton.jit
def _join(total_max, total, result, part_max, part_sum, part, scale_log2):
    """Return the running (max, sum, acc) with one more split's taken in."""
    new_max = tl.maximum(total_max, part_max)
    decay = tl.exp2((total_max - new_max) * scale_log2)
    weight = tl.exp2((part_max - new_max) * scale_log2)
    return new_max, total * decay + part_sum * weight, result * decay[:, None] + part * weight[:, None]


@triton.jit
def _keep_partial(partial_ptr, place, used_rows, row, column, row_max, row_sum, acc, real):
    """Store a split's (acc, max, sum) as `gqa_join_kernel` reads them."""
    DIM: tl.constexpr = acc.shape[1]
    partial = partial_ptr + (place * used_rows + row) * (DIM + 4)
    tl.store(partial[:, None] + column[None, :], acc, mask=real[:, None])
    tl.store(partial + DIM, row_max, mask=real)
    tl.store(partial + DIM + 1, row_sum, mask=real)


@triton.jit(do_not_specialize=["num_requests", "splits", "used_rows"])
def gqa_kernel(
    q_ptr, cache_ptr, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, num_requests, num_heads, splits, used_rows, scale_log2, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, BY_SPLIT: tl.constexpr, REQUESTS: tl.constexpr, KEY_START: tl.constexpr,
    NO_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
        first_head = (tl.program_id(1) % PARTS) * HEADS
        real = real_rows(row, count, first_head, GROUP, HEADS)
        column = tl.arange(0, DIM)
        result_row = head_rows(row, q_row, num_heads, kv_head, first_head, GROUP, HEADS)
        mask = real[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + result_row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        positions = position + row // HEADS
        table_ptr = block_tables_ptr + tl.maximum(slot, 0) * block_tables_stride
        keys_ptr = cache_ptr + kv_head * HEAD_DIM
        token_stride = 2 * KV_HEADS * HEAD_DIM
        values_offset = KV_HEADS * HEAD_DIM
        args = (q, positions, keys_ptr, values_offset, token_stride, table_ptr, scale_log2)

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
                        start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, True
                    )
            full = tl.maximum(tl.minimum((position + 1) // STEP_KEYS, end // STEP_KEYS) * STEP_KEYS, lead)
            for start in range(lead, full, STEP_KEYS):
                row_max, row_sum, acc = _gqa_step(
                    start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, False
                )
            for start in range(full, end, STEP_KEYS):
                row_max, row_sum, acc = _gqa_step(
                    start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, HEAD_DIM, DIM, True
                )
            split_sum = tl.max(row_sum, axis=1)  # its columns are equal
            if BY_SPLIT:
                total_max, total, result = row_max, split_sum, acc
            else:
                total_max, total, result = _join(total_max, total, result, row_max, split_sum, acc, scale_log2)

        if BY_SPLIT:
            place = tile_place() * splits + first_split
            _keep_partial(partial_ptr, place, used_rows, row, column, total_max, total, result, real)
        else:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            target = out_ptr + result_row[:, None] * HEAD_DIM + column[None, :]
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "splits", "used_rows"])
def gqa_join_kernel(
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
        first_place = tile_place() * splits
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
