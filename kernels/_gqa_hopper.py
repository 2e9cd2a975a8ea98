"""Grouped-query attention on Hopper, with keys and values on their way while others are taken in.

The steps of `gqa_attention`, to the bit, by Gluon: a tile has 64 rows; a step's keys and values, one block of the
cache, are fetched by the tensor memory accelerator into two rings of stages; and the weights go from one product to the
other in registers. What shows in the bits is kept: steps of 64 keys, splits of 256 and their join, and every product's
order over keys and columns.
"""

# mypy: ignore-errors

from specgen.kernels._hopper_attention import (
    clear_unseen,
    fetch,
    find_tile,
    hide_unseen,
    make_ones,
    nothing_seen,
    split_sum,
    sum_weights,
    weigh,
)
from specgen.kernels._tiles import head_rows, real_rows, tile_place
from specgen.kernels._triton import gl, gluon, hopper, next_stage_of, thread_barrier, wait_for_inputs


@gluon.jit
def join(total_max, total, result, part_max, part_sum, part, scale_log2):
    """Return the running (max, sum, acc) with one more split's taken in."""
    layout: gl.constexpr = gl.SliceLayout(1, result.type.layout)
    new_max = gl.maximum(total_max, part_max)
    decay = gl.exp2((total_max - new_max) * scale_log2)
    weight = gl.exp2((part_max - new_max) * scale_log2)
    decay_of_acc = gl.convert_layout(decay, layout, assert_trivial=True)[:, None]
    weight_of_acc = gl.convert_layout(weight, layout, assert_trivial=True)[:, None]
    return new_max, total * decay + part_sum * weight, result * decay_of_acc + part * weight_of_acc


@gluon.jit
def _start_rings(cache, table_ptr, num_steps, key_column, value_column, STAGES: gl.constexpr):
    """Return (keys, values, what tells that they are there) of STAGES stages, the first blocks on their way to them.

    And the number of the block after those.
    """
    STEP_KEYS: gl.constexpr = cache.block_type.shape[0]
    DIM: gl.constexpr = cache.block_type.shape[1]
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    keys = gl.allocate_shared_memory(cache.dtype, [STAGES, STEP_KEYS, DIM], cache.layout)
    values = gl.allocate_shared_memory(cache.dtype, [STAGES, STEP_KEYS, DIM], cache.layout)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(keys_ready.index(i), count=1)
        hopper.mbarrier.init(values_ready.index(i), count=1)
    hopper.fence_async_shared()
    for i in gl.static_range(STAGES):
        needed = i < num_steps
        block = gl.load(table_ptr + i, mask=needed, other=0)
        fetch(cache, block, key_column, keys.index(i), keys_ready.index(i), needed)
        fetch(cache, block, value_column, values.index(i), values_ready.index(i), needed)
    block = gl.load(table_ptr + STAGES, mask=num_steps > STAGES, other=0)
    return keys, values, keys_ready, values_ready, block


@gluon.jit
def _end_rings(keys_ready, values_ready, STAGES: gl.constexpr):
    """Give up what `_start_rings` returned: nothing is on its way any more."""
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(keys_ready.index(i))
        hopper.mbarrier.invalidate(values_ready.index(i))


@gluon.jit
def _load_queries(
    q_ptr, q_row, count, num_heads, kv_head, first_head, GROUP: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Return the tile's queries in shared memory, zeros where there is none."""
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
    real = real_rows(row, count, first_head, GROUP, HEADS)[:, None]
    q_rows = q_ptr + head_rows(row, q_row, num_heads, kv_head, first_head, GROUP, HEADS)[:, None] * DIM
    column = gl.arange(0, DIM, gl.SliceLayout(0, copy_layout))[None, :]
    queries = gl.load(q_rows + column, mask=real, other=0.0)
    return gl.allocate_shared_memory(queries.dtype, [ROWS, DIM], gl.NVMMASharedLayout(128, 16), queries)


@gluon.jit
def _start_scores(q, keys, keys_ready, stage, phase, needed):
    """Start multiplying the queries with a stage's keys once these are there; if not needed, with what is there."""
    ROWS: gl.constexpr = q.shape[0]
    STEP_KEYS: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    nothing = gl.zeros([ROWS, STEP_KEYS], gl.float32, layout)
    hopper.mbarrier.wait(keys_ready.index(stage), phase, pred=needed)
    return hopper.warpgroup_mma(q, keys.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _first_scores(q, cache, block, key_column, key_buffers, keys_ready, num_steps, STAGES: gl.constexpr):
    """Return the first step's scores; the first stage's next keys are on their way."""
    scores = _start_scores(q, key_buffers, keys_ready, 0, 0, num_steps > 0)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    thread_barrier()  # nobody reads the first keys any more
    fetch(cache, block, key_column, key_buffers.index(0), keys_ready.index(0), num_steps > STAGES)
    return scores


@gluon.jit
def _keep_partial(partial_ptr, place, used_rows, row_max, row_sum, acc, real, column):
    """Store a split's (acc, max, sum) as `gqa_join_kernel` reads them."""
    acc_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    DIM: gl.constexpr = acc.shape[1]
    partial = partial_ptr + (place * used_rows + gl.arange(0, acc.shape[0], acc_row)) * (DIM + 4)
    gl.store(partial[:, None] + column, acc, mask=real[:, None])
    gl.store(partial + DIM, gl.convert_layout(row_max, acc_row, assert_trivial=True), mask=real)
    gl.store(partial + DIM + 1, split_sum(row_sum, acc_row), mask=real)


@gluon.jit
def _start_values(
    scores, buffers, ready, stage, phase, start, full, end, positions, ones, row_max, row_sum, acc, scale_log2,
    KEY_START: gl.constexpr,
):  # fmt: skip
    """Start taking in a step's values, which are waited for, by the weights of its scores.

    All rows see every key of the steps in [lead, full). Returns (weights, row_max, row_sum, acc); the products still
    run.
    """
    STEP_KEYS: gl.constexpr = scores.shape[1]
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lead: gl.constexpr = (KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS
    is_edge = (start < lead) | (start + STEP_KEYS > full)
    if is_edge:
        scores = hide_unseen(scores, start, end, positions, KEY_START)
    weights, row_max, row_sum, acc = weigh(scores, row_max, row_sum, acc, scale_log2, buffers.dtype)
    values = buffers.index(stage)
    hopper.mbarrier.wait(ready.index(stage), phase)
    if is_edge:
        clear_unseen(values, start, end, KEY_START, copy_layout)
    row_sum = sum_weights(weights, ones, row_sum)
    acc = hopper.warpgroup_mma(weights, values, acc, is_async=True)
    return weights, row_max, row_sum, acc


@gluon.jit
def _store_result(
    out_ptr, total, result, row, real, column, q_row, num_heads, kv_head, first_head, GROUP: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Store a tile's result, divided by the sums of its weights, where its rows are in the output."""
    total = gl.convert_layout(total, gl.SliceLayout(1, result.type.layout), assert_trivial=True)
    result = result / gl.where(total > 0, total, 1.0)[:, None]
    rows = head_rows(row, q_row, num_heads, kv_head, first_head, GROUP, HEADS)
    target = out_ptr + rows[:, None] * result.shape[1] + column
    gl.store(target, result.to(out_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["num_requests", "splits", "used_rows", "splits_a_program"])
def gqa_hopper_kernel(
    q_ptr, cache, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, out_ptr,
    partial_ptr, num_requests, num_heads, splits, used_rows, splits_a_program, scale_log2, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEADS: gl.constexpr, PARTS: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr,
    DIM: gl.constexpr, STEP_KEYS: gl.constexpr, SPLIT_KEYS: gl.constexpr, STAGES: gl.constexpr, BY_SPLIT: gl.constexpr,
    REQUESTS: gl.constexpr, KEY_START: gl.constexpr, NO_MAX: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `gqa_kernel`; BY_SPLIT, a program takes some splits one after the other and keeps the partials of each.

    cache: descriptor of the cache in blocks of STEP_KEYS rows, a head's columns apart.
    """
    SPLIT_STEPS: gl.constexpr = SPLIT_KEYS // STEP_KEYS
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)

    slot, q_row, count, position = find_tile(
        gl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    num_keys = gl.where(slot >= 0, position + count, 0)
    first_split = gl.program_id(2) * splits_a_program
    low = first_split * SPLIT_KEYS
    wait_for_inputs(PDL)  # the layout of the step is older than the layer
    if (count > 0) & ((low < num_keys) | (not BY_SPLIT)):
        end = gl.minimum(low + splits_a_program * SPLIT_KEYS, num_keys)
        num_steps = (end - low + STEP_KEYS - 1) // STEP_KEYS
        table_ptr = block_tables_ptr + gl.maximum(slot, 0) * block_tables_stride + low // STEP_KEYS
        full = gl.minimum(position + 1, end)  # all rows see the keys before it
        kv_head = gl.program_id(1) // PARTS
        first_head = (gl.program_id(1) % PARTS) * HEADS
        key_column = kv_head * DIM
        value_column = (KV_HEADS + kv_head) * DIM
        key_buffers, value_buffers, keys_ready, values_ready, block = _start_rings(
            cache, table_ptr, num_steps, key_column, value_column, STAGES
        )
        q = _load_queries(q_ptr, q_row, count, num_heads, kv_head, first_head, GROUP, HEADS, ROWS, DIM)
        ones = make_ones(STEP_KEYS, q.dtype, copy_layout)

        positions = position + gl.arange(0, ROWS, score_row) // HEADS
        row = gl.arange(0, ROWS, acc_row)
        real = real_rows(row, count, first_head, GROUP, HEADS)
        column = gl.arange(0, DIM, gl.SliceLayout(0, acc_layout))[None, :]
        total_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
        total = gl.zeros([ROWS], gl.float32, score_row)
        result = gl.zeros([ROWS, DIM], gl.float32, acc_layout)
        row_max, row_sum, acc = nothing_seen(ROWS, STEP_KEYS, DIM, NO_MAX)

        scores = _first_scores(q, cache, block, key_column, key_buffers, keys_ready, num_steps, STAGES)
        stage = 0
        phase = 0
        for step in range(0, num_steps):
            start = low + step * STEP_KEYS
            ahead = step + 1 + STAGES
            next_block = gl.load(table_ptr + ahead, mask=ahead < num_steps, other=0)
            weights, row_max, row_sum, acc = _start_values(
                scores, value_buffers, values_ready, stage, phase, start, full, end, positions, ones, row_max, row_sum,
                acc, scale_log2, KEY_START,
            )  # fmt: skip
            # The next step's scores, while other tiles' weights are computed; after the last step they are not used.
            next_stage, next_phase = next_stage_of(stage, phase, STAGES)
            scores = _start_scores(q, key_buffers, keys_ready, next_stage, next_phase, step + 1 < num_steps)
            row_sum, acc, scores, weights = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc, scores, weights])
            thread_barrier()  # nobody reads these values and the next keys any more
            values = value_buffers.index(stage)
            fetch(cache, block, value_column, values, values_ready.index(stage), step + STAGES < num_steps)
            keys = key_buffers.index(next_stage)
            fetch(cache, next_block, key_column, keys, keys_ready.index(next_stage), ahead < num_steps)
            block, stage, phase = next_block, next_stage, next_phase
            if (step % SPLIT_STEPS == SPLIT_STEPS - 1) | (step + 1 == num_steps):
                if BY_SPLIT:
                    place = tile_place() * splits + (first_split + step // SPLIT_STEPS)
                    _keep_partial(partial_ptr, place, used_rows, row_max, row_sum, acc, real, column)
                else:
                    part_sum = split_sum(row_sum, score_row)
                    total_max, total, result = join(total_max, total, result, row_max, part_sum, acc, scale_log2)
                row_max, row_sum, acc = nothing_seen(ROWS, STEP_KEYS, DIM, NO_MAX)
        _end_rings(keys_ready, values_ready, STAGES)
        if not BY_SPLIT:
            _store_result(
                out_ptr, total, result, row, real, column, q_row, num_heads, kv_head, first_head, GROUP, HEADS
            )  # fmt: skip
