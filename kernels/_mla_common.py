"""What the forms of `mla_attention` share: tiles, cache rows, and the one arithmetic by which keys are taken in.

`take_in` is `gqa_attention`'s too.

A row has the same bits in both forms: inner indices are multiplied in the same order and keys added in the same order;
the sum of the weights is a product with ones, so that it has an order too.
"""

# mypy: ignore-errors

from specgen.kernels._tiles import find_tile as find_any_tile
from specgen.kernels._triton import tl, triton, wait_for_inputs

NO_MAX = tl.constexpr(-1.0e30)  # running maximum before the first key: finite, so that exp(max - max) is 1, never NaN
SUM_COLUMNS = tl.constexpr(16)  # the narrowest product


@triton.jit
def find_tile(
    tile,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    QUERIES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """As `_tiles.find_tile`; a padded request's slot is 0 and its position below any key, so that its rows see none."""
    slot, q_row, count, position = find_any_tile(
        tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    return tl.maximum(slot, 0), q_row, count, tl.where(slot >= 0, position, -QUERIES)


@triton.jit
def split_range(split, position, count, SPLIT_KEYS: tl.constexpr):
    """Return (a split's first key, the end of those that the tile may see, whether the split is the tile's)."""
    low = split * SPLIT_KEYS
    end = tl.maximum(tl.minimum(low + SPLIT_KEYS, position + count), low)
    return low, end, (count > 0) & ((low < end) | (split == 0))


@triton.jit
def cache_rows(start, end, table_ptr, BLOCK_SIZE: tl.constexpr, STEP_KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return the cache rows of the keys start..start + STEP_KEYS, int64; row 0 of a block for those past `end`."""
    step = tl.arange(0, STEP_KEYS)
    if BLOCK_SIZE % STEP_KEYS == 0:
        if MASKED:
            block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + step
    key = start + step
    if MASKED:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    return block * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def load_values(values, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Return a block of values in the queries' dtype, cleared where it is not finite if MASKED.

    A later query's key may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
    """
    block = tl.load(values, mask=mask, other=0.0).to(DTYPE)
    if MASKED:
        block = tl.where(tl.abs(block.to(tl.float32)) < float("inf"), block, 0.0).to(DTYPE)
    return block


@triton.jit
def take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS: tl.constexpr):
    """Take in a step's keys: scores [ROWS, STEP_KEYS] float32, values [STEP_KEYS, columns].

    The maximum stays in raw units: exp2((score - max) * scale) leaves nothing to contract into a fused multiply-add,
    which would give two forms other bits.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    decay = tl.exp2((row_max - new_max) * scale_log2)
    weights = tl.exp2((scores - new_max[:, None]) * scale_log2).to(values.dtype)
    ones = tl.full([STEP_KEYS, SUM_COLUMNS], 1.0, dtype=values.dtype)
    row_sum = tl.dot(weights, ones, row_sum * decay[:, None], input_precision="ieee")
    acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def full_range(low, end, position, STEP_KEYS: tl.constexpr, KEY_START: tl.constexpr):
    """Return (lead, full): [low, lead) holds keys before KEY_START, all rows see [lead, full), [full, end) is the edge.

    `position` is the tile's first.
    """
    lead = low
    if KEY_START > 0:
        lead = tl.minimum(tl.maximum((KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS, low), end)
    full = tl.minimum((position + 1) // STEP_KEYS * STEP_KEYS, end // STEP_KEYS * STEP_KEYS)
    return lead, tl.maximum(full, lead)


@triton.jit
def store_result(
    acc,
    row_max,
    row_sum,
    out_ptr,
    partial_ptr,
    place,
    row,
    result_row,
    real,
    column,
    rank,
    first_slice,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):
    """Write the result rows; with several splits their partial (acc, max, sum) at `place`."""
    total = tl.max(row_sum, axis=1)  # its columns are equal
    if not BY_SPLIT:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + result_row[:, None] * rank + column[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=real[:, None] & (column < rank)[None, :])
    else:
        partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
        tl.store(partial[:, None] + column[None, :], acc)
        if first_slice:
            tl.store(partial + RANK, row_max)
            tl.store(partial + RANK + 1, total)


@triton.jit(do_not_specialize=["first_tile", "num_requests", "splits"])
def mla_join_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    partial_ptr,
    out_ptr,
    first_tile,
    num_requests,
    num_heads,
    rank,
    splits,
    scale_log2,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join one row's partial results, first split first."""
    wait_for_inputs(PDL)
    row = tl.program_id(2)
    head = tl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    _, q_row, count, position = find_tile(
        first_tile + tl.program_id(0),
        idx_mapping_ptr,
        query_start_loc_ptr,
        seq_lens_ptr,
        num_requests,
        QUERIES,
        REQUESTS,
    )
    if (query < count) & (head < num_heads):
        column = tl.arange(0, RANK)
        first_place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * splits
        total_max = tl.full([1], NO_MAX, dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        acc = tl.zeros([RANK], dtype=tl.float32)
        for split in range(0, (position + query + SPLIT_KEYS) // SPLIT_KEYS):
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
