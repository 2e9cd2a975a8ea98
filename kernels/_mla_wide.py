"""Latent attention in its wide form, which spreads the steps of few tiles over the machine.

One kernel scores each step's keys by itself; the next walks through the scores with a slice of the values' columns.
"""

# mypy: ignore-errors

from specgen.kernels._mla_common import (
    NO_MAX,
    SUM_COLUMNS,
    cache_rows,
    find_tile,
    full_range,
    load_values,
    split_range,
    store_result,
    take_in,
)
from specgen.kernels._tiles import tile_place
from specgen.kernels._triton import tl, triton, wait_for_inputs


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_scores_kernel(
    q_ptr, cache_ptr, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    scores_ptr, first_tile, num_requests, num_heads, rank, rope_width, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr, KEY_START: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The wide form's first half: one tile's scores of one step's keys, -inf where a row does not see the key."""
    slot, q_row, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES,
        REQUESTS,
    )  # fmt: skip
    wait_for_inputs(PDL)  # the layout of the step is older than the layer
    start = tl.program_id(2) * STEP_KEYS
    end = position + count
    if (count > 0) & (start < end):
        ROWS: tl.constexpr = HEADS * QUERIES
        row = tl.arange(0, ROWS)
        head = tl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        real = (head < num_heads) & (query < count)
        key = start + tl.arange(0, STEP_KEYS)
        in_range = (key < end) & (key >= KEY_START)
        q_rows = q_ptr + ((q_row + query) * num_heads + head)[:, None] * (rank + rope_width)
        table_ptr = block_tables_ptr + slot * block_tables_stride
        rows = cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, True)
        key_rows = cache_ptr + rows[None, :] * (rank + rope_width)
        scores = tl.zeros([ROWS, STEP_KEYS], dtype=tl.float32)
        for first in range(0, RANK, CHUNK):
            column = first + tl.arange(0, CHUNK)
            is_column = column < rank
            q = tl.load(q_rows + column[None, :], mask=real[:, None] & is_column[None, :], other=0.0)
            k = tl.load(key_rows + column[:, None], mask=in_range[None, :] & is_column[:, None], other=0.0)
            scores = tl.dot(q, k.to(q.dtype), scores, input_precision="ieee")
        column = tl.arange(0, ROPE)
        is_column = column < rope_width
        q = tl.load(q_rows + rank + column[None, :], mask=real[:, None] & is_column[None, :], other=0.0)
        k = tl.load(key_rows + rank + column[:, None], mask=in_range[None, :] & is_column[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), scores, input_precision="ieee")
        visible = in_range[None, :] & (key[None, :] <= (position + query)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        target = scores_ptr + ((tile_place() * tl.num_programs(2) + tl.program_id(2)) * ROWS + row)[:, None] * STEP_KEYS
        tl.store(target + tl.arange(0, STEP_KEYS)[None, :], scores)


@triton.jit
def _load_step(
    start,
    end,
    scores_ptr,
    cache_ptr,
    table_ptr,
    column,
    rank,
    width,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return a step's scores from `mla_scores_kernel`, and its keys' values."""
    step = tl.arange(0, STEP_KEYS)
    row = tl.arange(0, ROWS)
    scores_ptr += (start // STEP_KEYS * ROWS + row)[:, None] * STEP_KEYS + step[None, :]
    mask = (column < rank)[None, :]
    if MASKED:  # there may be no such step
        scores = tl.load(scores_ptr, mask=(start + 0 * row < end)[:, None], other=0.0)
        mask = mask & ((start + step < end) & (start + step >= KEY_START))[:, None]
    else:
        scores = tl.load(scores_ptr)
    values = cache_ptr + cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED)[:, None] * width
    return scores, load_values(values + column[None, :], mask, DTYPE, MASKED)


@triton.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_values_kernel(
    scores_ptr, cache_ptr, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, first_tile, num_requests, num_steps, num_heads, rank, rope_width, scale_log2,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, SLICE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, BY_SPLIT: tl.constexpr, REQUESTS: tl.constexpr,
    KEY_START: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The wide form's second half: one tile's rows, one split's keys, a slice of the values' columns."""
    SLICES: tl.constexpr = RANK // SLICE
    split = tl.program_id(2) // SLICES
    part = tl.program_id(2) % SLICES
    slot, q_row, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES,
        REQUESTS,
    )  # fmt: skip
    wait_for_inputs(PDL)  # the layout of the step is older than the layer
    low, end, works = split_range(split, position, count, SPLIT_KEYS)
    if works:
        ROWS: tl.constexpr = HEADS * QUERIES
        row = tl.arange(0, ROWS)
        head = tl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        place = tile_place()
        column = part * SLICE + tl.arange(0, SLICE)
        table_ptr = block_tables_ptr + slot * block_tables_stride
        tile_scores = scores_ptr + place * num_steps * ROWS * STEP_KEYS
        width = rank + rope_width
        row_max = tl.full([ROWS], NO_MAX, dtype=tl.float32)
        row_sum = tl.zeros([ROWS, SUM_COLUMNS], dtype=tl.float32)
        acc = tl.zeros([ROWS, SLICE], dtype=tl.float32)
        lead, full = full_range(low, end, position, STEP_KEYS, KEY_START)
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        args = (tile_scores, cache_ptr, table_ptr, column, rank, width)
        # What not all rows see comes last and is asked for first: no loop is there to hide its way.
        edge_scores, edge_values = _load_step(full, end, *args, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, DTYPE, True)
        if KEY_START > 0:
            for start in range(low, lead, STEP_KEYS):
                scores, values = _load_step(start, end, *args, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, DTYPE, True)
                row_max, row_sum, acc = take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS)
        for start in range(lead, full, STEP_KEYS):
            scores, values = _load_step(start, end, *args, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, DTYPE, False)
            row_max, row_sum, acc = take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS)
        if full < end:
            row_max, row_sum, acc = take_in(edge_scores, edge_values, row_max, row_sum, acc, scale_log2, STEP_KEYS)
        for start in range(full + STEP_KEYS, end, STEP_KEYS):
            scores, values = _load_step(start, end, *args, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, DTYPE, True)
            row_max, row_sum, acc = take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS)
        store_result(
            acc, row_max, row_sum, out_ptr, partial_ptr, place * (tl.num_programs(2) // SLICES) + split, row,
            (q_row + query) * num_heads + head, (head < num_heads) & (query < count), column, rank, part == 0, RANK,
            ROWS, BY_SPLIT,
        )  # fmt: skip
