"""Latent attention in its whole form: a tile walks through a split's keys in one program."""

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


@triton.jit
def _mla_step(
    start,
    end,
    row_max,
    row_sum,
    acc,
    q_latent,
    q_rope,
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
    """Score a step's keys and take them in. MASKED: some row may not see all of them, none sees one from `end` on."""
    key = start + tl.arange(0, STEP_KEYS)
    latent_column = tl.arange(0, RANK)
    rope_column = tl.arange(0, ROPE)
    cache_row = cache_ptr + cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED) * (rank + rope_width)
    latent_mask = (latent_column < rank)[None, :]
    rope_mask = (rope_column < rope_width)[None, :]
    if MASKED:
        in_range = (key < end) & (key >= KEY_START)
        latent_mask = latent_mask & in_range[:, None]
        rope_mask = rope_mask & in_range[:, None]
    latent = load_values(cache_row[:, None] + latent_column[None, :], latent_mask, q_latent.dtype, MASKED)
    rope = tl.load(cache_row[:, None] + rank + rope_column[None, :], mask=rope_mask, other=0.0).to(q_rope.dtype)
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    if MASKED:
        visible = in_range[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    return take_in(scores, latent, row_max, row_sum, acc, scale_log2, STEP_KEYS)


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_split_kernel(
    q_ptr, cache_ptr, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, first_tile, num_requests, num_heads, rank, rope_width, scale_log2, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, BY_SPLIT: tl.constexpr, REQUESTS: tl.constexpr, KEY_START: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The whole form: one tile's rows against one split's keys."""
    split = tl.program_id(2)
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
        row_sum = tl.zeros([ROWS, SUM_COLUMNS], dtype=tl.float32)
        acc = tl.zeros([ROWS, RANK], dtype=tl.float32)
        args = (q_latent, q_rope, positions, cache_ptr, table_ptr, rank, rope_width, scale_log2)
        lead, full = full_range(low, end, position, STEP_KEYS, KEY_START)
        if KEY_START > 0:
            for start in range(low, lead, STEP_KEYS):
                row_max, row_sum, acc = _mla_step(
                    start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, True
                )
        for start in range(lead, full, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, False
            )
        for start in range(full, end, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, row_max, row_sum, acc, *args, BLOCK_SIZE, STEP_KEYS, KEY_START, RANK, ROPE, True
            )
        place = tile_place() * tl.num_programs(2) + split
        store_result(
            acc, row_max, row_sum, out_ptr, partial_ptr, place, row, result_row, real, latent_column, rank, True,
            RANK, ROWS, BY_SPLIT,
        )  # fmt: skip
