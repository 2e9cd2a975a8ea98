"""Latent attention in its whole form: a tile walks through its keys in two programs, one for each half of the values.

So the running sums fit into registers, which outweighs that both programs score every key.
"""

# mypy: ignore-errors

from specgen.kernels._mla_common import (
    NO_MAX,
    SUM_COLUMNS,
    cache_rows,
    cleared,
    find_tile,
    full_range,
    load_values,
    store_result,
    take_in,
)
from specgen.kernels._triton import tl, triton, wait_for_inputs


@triton.jit
def _mla_step(
    start,
    end,
    q_low,
    q_high,
    q_rope,
    row_max,
    row_sum,
    acc,
    positions,
    cache_ptr,
    latent_desc,
    rope_desc,
    table_ptr,
    rank,
    rope_width,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    PART: tl.constexpr,
    BY_TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Score a step's keys and take in a half of their values.

    MASKED: some row may not see all of them, none sees one from `end` on.
    """
    key = start + tl.arange(0, STEP_KEYS)
    column = tl.arange(0, HALF)
    rope_column = tl.arange(0, ROPE)
    if MASKED:
        in_range = (key < end) & (key >= KEY_START)
    if BY_TMA:
        first_row = tl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
        low = latent_desc.load([first_row, 0])
        high = latent_desc.load([first_row, HALF])
        rope = rope_desc.load([first_row, rank])
        if MASKED:
            if PART == 0:
                low = cleared(low, in_range)
            else:
                high = cleared(high, in_range)
    else:
        cache_row = cache_ptr + cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED) * (rank + rope_width)
        low_mask = (column < rank)[None, :]
        high_mask = (HALF + column < rank)[None, :]
        rope_mask = (rope_column < rope_width)[None, :]
    if MASKED and not BY_TMA:
        low_mask = low_mask & in_range[:, None]
        high_mask = high_mask & in_range[:, None]
        rope_mask = rope_mask & in_range[:, None]
    if not BY_TMA:
        low = load_values(cache_row[:, None] + column[None, :], low_mask, MASKED and PART == 0)
        high = load_values(cache_row[:, None] + HALF + column[None, :], high_mask, MASKED and PART == 1)
        rope = tl.load(cache_row[:, None] + rank + rope_column[None, :], mask=rope_mask, other=0.0)
    scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(high), scores, input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    if MASKED:
        visible = in_range[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    if PART == 0:
        return take_in(scores, low, row_max, row_sum, acc, scale_log2, STEP_KEYS)
    else:
        return take_in(scores, high, row_max, row_sum, acc, scale_log2, STEP_KEYS)


@triton.jit
def _attend(
    low,
    end,
    position,
    q_low,
    q_high,
    q_rope,
    positions,
    cache_ptr,
    latent_desc,
    rope_desc,
    table_ptr,
    rank,
    rope_width,
    scale_log2,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    PART: tl.constexpr,
    BY_TMA: tl.constexpr,
):
    """Return a tile's (max, sum, acc) over the keys low..end, acc of one half of the values."""
    row_max = tl.full([ROWS], NO_MAX, dtype=tl.float32)
    row_sum = tl.zeros([ROWS, SUM_COLUMNS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HALF], dtype=tl.float32)
    lead, full = full_range(low, end, position, STEP_KEYS, KEY_START)
    if KEY_START > 0:
        for start in range(low, lead, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
                rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS,
                KEY_START, HALF, ROPE, PART, BY_TMA, True,
            )  # fmt: skip
    for start in range(lead, full, STEP_KEYS):
        row_max, row_sum, acc = _mla_step(
            start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
            rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS,
            KEY_START, HALF, ROPE, PART, BY_TMA, False,
        )  # fmt: skip
    for start in range(full, end, STEP_KEYS):
        row_max, row_sum, acc = _mla_step(
            start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
            rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS,
            KEY_START, HALF, ROPE, PART, BY_TMA, True,
        )  # fmt: skip
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_split_kernel(
    q_ptr,
    cache_ptr,
    latent_desc,
    rope_desc,
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
    BY_TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """The whole form: one tile's rows against one split's keys, for one half of the values."""
    split = tl.program_id(2) // 2
    part = tl.program_id(2) % 2
    slot, q_row, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
    low = split * SPLIT_KEYS
    end = tl.maximum(tl.minimum(low + SPLIT_KEYS, position + count), low)
    if (count > 0) & ((low < end) | (split == 0)):
        ROWS: tl.constexpr = HEADS * QUERIES
        HALF: tl.constexpr = RANK // 2
        row = tl.arange(0, ROWS)
        head = tl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        real = (head < num_heads) & (query < count)
        column = tl.arange(0, HALF)
        rope_column = tl.arange(0, ROPE)
        result_row = (q_row + query) * num_heads + head
        q_rows = q_ptr + result_row[:, None] * (rank + rope_width)
        q_low = tl.load(q_rows + column[None, :], mask=real[:, None] & (column < rank)[None, :], other=0.0)
        q_high = tl.load(
            q_rows + HALF + column[None, :], mask=real[:, None] & (HALF + column < rank)[None, :], other=0.0
        )
        q_rope = tl.load(
            q_rows + rank + rope_column[None, :], mask=real[:, None] & (rope_column < rope_width)[None, :], other=0.0
        )
        table_ptr = block_tables_ptr + slot * block_tables_stride
        if part == 0:
            row_max, row_sum, acc = _attend(
                low, end, position, q_low, q_high, q_rope, position + query,
                cache_ptr, latent_desc, rope_desc, table_ptr, rank, rope_width, scale_log2,
                ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, 0, BY_TMA,
            )  # fmt: skip
        else:
            row_max, row_sum, acc = _attend(
                low, end, position, q_low, q_high, q_rope, position + query,
                cache_ptr, latent_desc, rope_desc, table_ptr, rank, rope_width, scale_log2,
                ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, 1, BY_TMA,
            )  # fmt: skip
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SPLITS + split
        store_result(
            acc, row_max, tl.max(row_sum, axis=1), out_ptr, partial_ptr, place, row, result_row, real,
            part * HALF + column, rank, part == 0, RANK, ROWS, SPLITS,
        )  # fmt: skip
