"""The Triton kernels of `mla_attention`: one arithmetic for a row, in two forms that give the same bits.

The whole form walks a tile through its keys in two programs, one for each half of the values: so the running sums fit
into registers, which outweighs that both score every key. The wide form, for few tiles, spreads the same steps over
the machine: one kernel scores each step's keys by itself, the next walks through the scores with a slice of the values.
Both multiply in the same order of inner indices and add up in the same order of keys; the sum of the weights is a
product with ones, so that it has an order too.
"""

# mypy: ignore-errors

from specgen.kernels._triton import tl, triton, wait_for_inputs

_NO_MAX = tl.constexpr(-1.0e30)  # running maximum before the first key: finite, so that exp(max - max) is 1, never NaN
_SUM_COLUMNS = tl.constexpr(16)  # the narrowest product


@triton.jit
def _find_tile(
    tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES: tl.constexpr, SEARCH: tl.constexpr
):
    """Return a tile's (slot, first row of q, number of queries (0: no such tile), first position).

    A padded request's position is below any key, so that its rows see none.
    """
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
    count = tl.minimum(tl.maximum(query_len - offset, 0), QUERIES)
    position = tl.load(seq_lens_ptr + request) - query_len + offset
    position = tl.where(slot >= 0, position, -QUERIES)
    slot = tl.maximum(slot, 0)
    return slot.to(tl.int64), (row + offset).to(tl.int64), count, position


@triton.jit
def _cache_rows(start, end, table_ptr, BLOCK_SIZE: tl.constexpr, STEP_KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return the cache rows of the keys start..start + STEP_KEYS, int64; row 0 of a block for those past `end`."""
    step = tl.arange(0, STEP_KEYS)
    if BLOCK_SIZE % STEP_KEYS == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + step
    key = start + step
    if MASKED:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    return block * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _load_values(values, mask, MASKED: tl.constexpr):
    """Return a block of values, cleared where it is not finite if MASKED.

    A later query's key may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
    """
    block = tl.load(values, mask=mask, other=0.0)
    if MASKED:
        block = tl.where(tl.abs(block.to(tl.float32)) < float("inf"), block, 0.0).to(values.dtype.element_ty)
    return block


@triton.jit
def _cleared(block, in_range):
    """Return the block with what is hidden or not finite set to 0."""
    return tl.where((tl.abs(block.to(tl.float32)) < float("inf")) & in_range[:, None], block, 0.0).to(block.dtype)


@triton.jit
def _take_in(scores, values, row_max, row_sum, acc, scale_log2, STEP_KEYS: tl.constexpr):
    """Take in a step's keys: scores [ROWS, STEP_KEYS] float32, values [STEP_KEYS, columns].

    The maximum stays in raw units: exp2((score - max) * scale) leaves nothing to contract into a fused multiply-add,
    which would give two forms other bits.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    decay = tl.exp2((row_max - new_max) * scale_log2)
    weights = tl.exp2((scores - new_max[:, None]) * scale_log2).to(values.dtype)
    ones = tl.full([STEP_KEYS, _SUM_COLUMNS], 1.0, dtype=values.dtype)
    row_sum = tl.dot(weights, ones, row_sum * decay[:, None], input_precision="ieee")
    acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _full_range(low, end, position, STEP_KEYS: tl.constexpr, KEY_START: tl.constexpr):
    """Return (lead, full): [low, lead) holds keys before KEY_START, all rows see [lead, full), [full, end) is the edge.

    `position` is the tile's first.
    """
    lead = low
    if KEY_START > 0:
        lead = tl.minimum(tl.maximum((KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS, low), end)
    full = tl.minimum((position + 1) // STEP_KEYS * STEP_KEYS, end // STEP_KEYS * STEP_KEYS)
    return lead, tl.maximum(full, lead)


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
                low = _cleared(low, in_range)
            else:
                high = _cleared(high, in_range)
    else:
        cache_row = cache_ptr + _cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED) * (rank + rope_width)
        low_mask = (column < rank)[None, :]
        high_mask = (HALF + column < rank)[None, :]
        rope_mask = (rope_column < rope_width)[None, :]
    if MASKED and not BY_TMA:
        low_mask = low_mask & in_range[:, None]
        high_mask = high_mask & in_range[:, None]
        rope_mask = rope_mask & in_range[:, None]
    if not BY_TMA:
        low = _load_values(cache_row[:, None] + column[None, :], low_mask, MASKED and PART == 0)
        high = _load_values(cache_row[:, None] + HALF + column[None, :], high_mask, MASKED and PART == 1)
        rope = tl.load(cache_row[:, None] + rank + rope_column[None, :], mask=rope_mask, other=0.0)
    scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(high), scores, input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    if MASKED:
        visible = in_range[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    if PART == 0:
        return _take_in(scores, low, row_max, row_sum, acc, scale_log2, STEP_KEYS)
    else:
        return _take_in(scores, high, row_max, row_sum, acc, scale_log2, STEP_KEYS)


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
    row_max = tl.full([ROWS], _NO_MAX, dtype=tl.float32)
    row_sum = tl.zeros([ROWS, _SUM_COLUMNS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HALF], dtype=tl.float32)
    lead, full = _full_range(low, end, position, STEP_KEYS, KEY_START)
    if KEY_START > 0:
        for start in range(low, lead, STEP_KEYS):
            row_max, row_sum, acc = _mla_step(
                start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
                rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, PART, BY_TMA, True,
            )  # fmt: skip
    for start in range(lead, full, STEP_KEYS):
        row_max, row_sum, acc = _mla_step(
            start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
            rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, PART, BY_TMA, False,
        )  # fmt: skip
    for start in range(full, end, STEP_KEYS):
        row_max, row_sum, acc = _mla_step(
            start, end, q_low, q_high, q_rope, row_max, row_sum, acc, positions, cache_ptr, latent_desc,
            rope_desc, table_ptr, rank, rope_width, scale_log2, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, PART, BY_TMA, True,
        )  # fmt: skip
    return row_max, row_sum, acc


@triton.jit
def _store_result(
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
    SPLITS: tl.constexpr,
):
    """Write the result rows; with several splits their partial (acc, max, sum) at `place`."""
    total = tl.max(row_sum, axis=1)  # its columns are equal
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + result_row[:, None] * rank + column[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=real[:, None] & (column < rank)[None, :])
    else:
        partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
        tl.store(partial[:, None] + column[None, :], acc)
        if first_slice:
            tl.store(partial + RANK, row_max)
            tl.store(partial + RANK + 1, total)


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
    slot, q_row, count, position = _find_tile(
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
                cache_ptr, latent_desc, rope_desc, table_ptr, rank, rope_width, scale_log2, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, 0, BY_TMA,
            )  # fmt: skip
        else:
            row_max, row_sum, acc = _attend(
                low, end, position, q_low, q_high, q_rope, position + query,
                cache_ptr, latent_desc, rope_desc, table_ptr, rank, rope_width, scale_log2, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, HALF, ROPE, 1, BY_TMA,
            )  # fmt: skip
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SPLITS + split
        _store_result(
            acc, row_max, row_sum, out_ptr, partial_ptr, place, row, result_row, real, part * HALF + column, rank,
            part == 0, RANK, ROWS, SPLITS,
        )  # fmt: skip


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
    """The wide form's first half: one tile's scores of one step's keys, -inf where a row does not see the key."""
    slot, q_row, count, position = _find_tile(
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
        rows = _cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, True)
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


@triton.jit
def _values_step(
    start,
    end,
    row_max,
    row_sum,
    acc,
    scores_ptr,
    cache_ptr,
    table_ptr,
    column,
    rank,
    width,
    scale_log2,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    KEY_START: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take in a step's keys with their scores from `mla_scores_kernel`."""
    step = tl.arange(0, STEP_KEYS)
    row = tl.arange(0, ROWS)
    scores = tl.load(scores_ptr + (start // STEP_KEYS * ROWS + row)[:, None] * STEP_KEYS + step[None, :])
    values = cache_ptr + _cache_rows(start, end, table_ptr, BLOCK_SIZE, STEP_KEYS, MASKED)[:, None] * width
    mask = (column < rank)[None, :]
    if MASKED:
        mask = mask & ((start + step < end) & (start + step >= KEY_START))[:, None]
    block = _load_values(values + column[None, :], mask, MASKED)
    return _take_in(scores, block, row_max, row_sum, acc, scale_log2, STEP_KEYS)


@triton.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_values_kernel(
    scores_ptr,
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
    scale_log2,
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
    """The wide form's second half: one tile's rows, one split's keys, a slice of the values' columns."""
    SLICES: tl.constexpr = RANK // SLICE
    split = tl.program_id(2) // SLICES
    part = tl.program_id(2) % SLICES
    slot, q_row, count, position = _find_tile(
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
        tile_scores = scores_ptr + place * num_steps * ROWS * STEP_KEYS
        width = rank + rope_width
        row_max = tl.full([ROWS], _NO_MAX, dtype=tl.float32)
        row_sum = tl.zeros([ROWS, _SUM_COLUMNS], dtype=tl.float32)
        acc = tl.zeros([ROWS, SLICE], dtype=tl.float32)
        lead, full = _full_range(low, end, position, STEP_KEYS, KEY_START)
        if KEY_START > 0:
            for start in range(low, lead, STEP_KEYS):
                row_max, row_sum, acc = _values_step(
                    start, end, row_max, row_sum, acc, tile_scores, cache_ptr, table_ptr, column, rank, width,
                    scale_log2, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, True,
                )  # fmt: skip
        for start in range(lead, full, STEP_KEYS):
            row_max, row_sum, acc = _values_step(
                start, end, row_max, row_sum, acc, tile_scores, cache_ptr, table_ptr, column, rank, width,
                scale_log2, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, False,
            )  # fmt: skip
        for start in range(full, end, STEP_KEYS):
            row_max, row_sum, acc = _values_step(
                start, end, row_max, row_sum, acc, tile_scores, cache_ptr, table_ptr, column, rank, width,
                scale_log2, ROWS, BLOCK_SIZE, STEP_KEYS, KEY_START, True,
            )  # fmt: skip
        _store_result(
            acc, row_max, row_sum, out_ptr, partial_ptr, place * SPLITS + split, row,
            (q_row + query) * num_heads + head, (head < num_heads) & (query < count), column, rank, part == 0, RANK,
            ROWS, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile", "num_requests"])
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
    scale_log2,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SEARCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join one row's partial results, first split first."""
    wait_for_inputs(PDL)
    row = tl.program_id(2)
    head = tl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    _, q_row, count, position = _find_tile(
        first_tile + tl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, SEARCH
    )
    if (query < count) & (head < num_heads):
        column = tl.arange(0, RANK)
        first_place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SPLITS
        total_max = tl.full([1], _NO_MAX, dtype=tl.float32)
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
