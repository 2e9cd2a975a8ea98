"""Latent attention in its wide form, which spreads the steps of few tiles over the machine.

One kernel scores each step's keys by itself, the next turns the scores of a few rows into weights, step by step, and
the last adds up the values, a slice of their columns a program.
"""

# mypy: ignore-errors

from specgen.kernels._mla_common import (
    NO_MAX,
    SUM_COLUMNS,
    cache_rows,
    find_tile,
    full_range,
    load_values,
    store_result,
)
from specgen.kernels._triton import tl, triton, wait_for_inputs


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_scores_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    block_tables_stride,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    scores_ptr,
    first_tile,
    num_requests,
    num_heads,
    rank,
    rope_width,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    SEARCH: tl.constexpr,
    KEY_START: tl.constexpr,
    PDL: tl.constexpr,
):
    """The wide form's first part: one tile's scores of one step's keys, -inf where a row does not see the key."""
    slot, q_row, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
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
            scores = tl.dot(q, k, scores, input_precision="ieee")
        column = tl.arange(0, ROPE)
        is_column = column < rope_width
        q = tl.load(q_rows + rank + column[None, :], mask=real[:, None] & is_column[None, :], other=0.0)
        k = tl.load(key_rows + rank + column[:, None], mask=in_range[None, :] & is_column[:, None], other=0.0)
        scores = tl.dot(q, k, scores, input_precision="ieee")
        visible = in_range[None, :] & (key[None, :] <= (position + query)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        target = scores_ptr + ((place * tl.num_programs(2) + tl.program_id(2)) * ROWS + row)[:, None] * STEP_KEYS
        tl.store(target + tl.arange(0, STEP_KEYS)[None, :], scores)


@triton.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_weights_kernel(
    scores_ptr,
    weights_ptr,
    decays_ptr,
    sums_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    first_tile,
    num_requests,
    num_steps,
    scale_log2,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    SEARCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The wide form's second part: GROUP rows of a tile turn one split's scores into weights, step by step.

    Leaves each step's weights and the factor by which what came before it shrinks, and the split's maximum and sum.
    """
    GROUPS: tl.constexpr = HEADS * QUERIES // GROUP
    split = tl.program_id(2) // GROUPS
    _, _, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
    low = split * SPLIT_KEYS
    end = tl.maximum(tl.minimum(low + SPLIT_KEYS, position + count), low)
    if (count > 0) & ((low < end) | (split == 0)):
        ROWS: tl.constexpr = HEADS * QUERIES
        row = tl.program_id(2) % GROUPS * GROUP + tl.arange(0, GROUP)
        key = tl.arange(0, STEP_KEYS)
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        first_row = place * num_steps * ROWS
        dtype: tl.constexpr = weights_ptr.dtype.element_ty
        row_max = tl.full([GROUP], NO_MAX, dtype=tl.float32)
        row_sum = tl.zeros([GROUP, SUM_COLUMNS], dtype=tl.float32)
        ones = tl.full([STEP_KEYS, SUM_COLUMNS], 1.0, dtype=dtype)
        for start in range(low, end, STEP_KEYS):
            at = first_row + start // STEP_KEYS * ROWS + row
            cells = at[:, None] * STEP_KEYS + key[None, :]
            scores = tl.load(scores_ptr + cells)
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            decay = tl.exp2((row_max - new_max) * scale_log2)
            weights = tl.exp2((scores - new_max[:, None]) * scale_log2).to(dtype)
            row_sum = tl.dot(weights, ones, row_sum * decay[:, None], input_precision="ieee")
            row_max = new_max
            tl.store(weights_ptr + cells, weights)
            tl.store(decays_ptr + at, decay)
        sums = sums_ptr + ((place * SPLITS + split) * ROWS + row) * 2
        tl.store(sums, row_max)
        tl.store(sums + 1, tl.max(row_sum, axis=1))


@triton.jit
def _values_step(
    start,
    end,
    acc,
    weights_ptr,
    decays_ptr,
    first_row,
    cache_ptr,
    table_ptr,
    column,
    rank,
    width,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a step's values, weighted."""
    key = tl.arange(0, STEP_KEYS)
    at = first_row + start // STEP_KEYS * ROWS + tl.arange(0, ROWS)
    weights = tl.load(weights_ptr + at[:, None] * STEP_KEYS + key[None, :])
    decay = tl.load(decays_ptr + at)
    values = cache_ptr + cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED)[:, None] * width
    mask = (column < rank)[None, :]
    if MASKED:
        mask = mask & ((start + key < end) & (start + key >= KEY_START))[:, None]
    block = load_values(values + column[None, :], mask, MASKED)
    return tl.dot(weights, block, acc * decay[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_values_kernel(
    weights_ptr,
    decays_ptr,
    sums_ptr,
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
    num_steps,
    num_heads,
    rank,
    rope_width,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SEARCH: tl.constexpr,
    KEY_START: tl.constexpr,
    PDL: tl.constexpr,
):
    """The wide form's last part: one tile's rows, one split's keys, a slice of the values' columns."""
    SLICES: tl.constexpr = RANK // SLICE
    split = tl.program_id(2) // SLICES
    part = tl.program_id(2) % SLICES
    slot, q_row, count, position = find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
    low = split * SPLIT_KEYS
    end = tl.maximum(tl.minimum(low + SPLIT_KEYS, position + count), low)
    if (count > 0) & ((low < end) | (split == 0)):
        ROWS: tl.constexpr = HEADS * QUERIES
        row = tl.arange(0, ROWS)
        head = tl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        column = part * SLICE + tl.arange(0, SLICE)
        table_ptr = block_tables_ptr + slot * block_tables_stride
        first_row = place * num_steps * ROWS
        width = rank + rope_width
        acc = tl.zeros([ROWS, SLICE], dtype=tl.float32)
        lead, full = full_range(low, end, position, STEP_KEYS, KEY_START)
        if KEY_START > 0:
            for start in range(low, lead, STEP_KEYS):
                acc = _values_step(
                    start, end, acc, weights_ptr, decays_ptr, first_row, cache_ptr, table_ptr, column, rank, width,
                    ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, True,
                )  # fmt: skip
        for start in range(lead, full, STEP_KEYS):
            acc = _values_step(
                start, end, acc, weights_ptr, decays_ptr, first_row, cache_ptr, table_ptr, column, rank, width,
                ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, False,
            )  # fmt: skip
        for start in range(full, end, STEP_KEYS):
            acc = _values_step(
                start, end, acc, weights_ptr, decays_ptr, first_row, cache_ptr, table_ptr, column, rank, width,
                ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, True,
            )  # fmt: skip
        sums = sums_ptr + ((place * SPLITS + split) * ROWS + row) * 2
        store_result(
            acc, tl.load(sums), tl.load(sums + 1), out_ptr, partial_ptr, place * SPLITS + split, row,
            (q_row + query) * num_heads + head, (head < num_heads) & (query < count), column, rank, part == 0, RANK,
            ROWS, SPLITS,
        )  # fmt: skip
