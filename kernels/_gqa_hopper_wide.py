"""Grouped-query attention on Hopper for many queries: as `_gqa_hopper`, two groups of warps behind one that fetches.

A tile has 128 rows; each of two groups of four warps has 64 of them and its own pace, so that one multiplies while the
other weighs. Both must have freed a stage before the warp that fetches fills it again.
"""

# mypy: ignore-errors

from specgen.kernels._gqa_hopper import (
    SUM_COLUMNS,
    clear_unseen,
    fetch,
    hide_unseen,
    join,
    make_ones,
    split_sum,
    sum_weights,
    weigh,
)
from specgen.kernels._tiles import tile_of_request
from specgen.kernels._triton import gl, gluon, hopper, thread_barrier, wait_for_inputs


@gluon.jit
def _produce(
    cache, table_ptr, num_steps, key_column, value_column, key_buffers, value_buffers, keys_ready, values_ready,
    keys_free, values_free, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill one stage after the other, each as soon as it is free."""
    stage = 0
    phase = 1  # what was never used is free
    block = gl.load(table_ptr, mask=num_steps > 0, other=0)
    for step in range(0, num_steps):
        next_block = gl.load(table_ptr + step + 1, mask=step + 1 < num_steps, other=0)
        hopper.mbarrier.wait(keys_free.index(stage), phase)
        fetch(cache, block, key_column, key_buffers.index(stage), keys_ready.index(stage), True)
        hopper.mbarrier.wait(values_free.index(stage), phase)
        fetch(cache, block, value_column, value_buffers.index(stage), values_ready.index(stage), True)
        block = next_block
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _consume(
    q_ptr, out_ptr, q_row, count, position, num_keys, num_heads, kv_head, first_head, scale_log2, q, ones, key_buffers,
    value_buffers, keys_ready, values_ready, keys_free, values_free, FIRST_ROW: gl.constexpr, GROUP: gl.constexpr,
    HEADS: gl.constexpr, SPLIT_KEYS: gl.constexpr, STAGES: gl.constexpr, KEY_START: gl.constexpr, NO_MAX: gl.constexpr,
):  # fmt: skip
    """Attend from 64 rows of the tile to one stage after the other, each as soon as it is ready."""
    ROWS: gl.constexpr = 64
    STEP_KEYS: gl.constexpr = key_buffers.shape[1]
    DIM: gl.constexpr = key_buffers.shape[2]
    SPLIT_STEPS: gl.constexpr = SPLIT_KEYS // STEP_KEYS
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)

    row = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
    head = first_head + row % HEADS
    query = row // HEADS
    real = ((head < GROUP) & (query < count))[:, None]
    q_rows = q_ptr + ((q_row + query) * num_heads + kv_head * GROUP + head)[:, None] * DIM
    column = gl.arange(0, DIM, gl.SliceLayout(0, copy_layout))[None, :]
    q = q.index(FIRST_ROW // ROWS)
    q.store(gl.load(q_rows + column, mask=real, other=0.0))
    hopper.fence_async_shared()
    thread_barrier()

    num_steps = (num_keys + STEP_KEYS - 1) // STEP_KEYS
    # All rows of the tile see every key of the steps in [lead, full): both groups clear the same values.
    lead = (KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS
    full = gl.minimum(position + 1, num_keys)
    positions = position + (FIRST_ROW + gl.arange(0, ROWS, score_row)) // HEADS
    total_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
    total = gl.zeros([ROWS], gl.float32, score_row)
    result = gl.zeros([ROWS, DIM], gl.float32, acc_layout)
    row_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
    row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
    acc = gl.zeros([ROWS, DIM], gl.float32, acc_layout)
    no_scores = gl.zeros([ROWS, STEP_KEYS], gl.float32, scores_layout)

    hopper.mbarrier.wait(keys_ready.index(0), 0, pred=num_steps > 0)
    scores = hopper.warpgroup_mma(q, key_buffers.index(0).permute([1, 0]), no_scores, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    thread_barrier()  # nobody of this group reads the first keys any more
    hopper.mbarrier.arrive(keys_free.index(0))
    stage = 0
    phase = 0
    for step in range(0, num_steps):
        start = step * STEP_KEYS
        is_edge = (start < lead) | (start + STEP_KEYS > full)
        if is_edge:
            scores = hide_unseen(scores, start, num_keys, positions, KEY_START)
        weights, row_max, row_sum, acc = weigh(scores, row_max, row_sum, acc, scale_log2, DTYPE)
        values = value_buffers.index(stage)
        hopper.mbarrier.wait(values_ready.index(stage), phase)
        if is_edge:
            clear_unseen(values, start, num_keys, KEY_START, copy_layout)
            hopper.fence_async_shared()
            thread_barrier()
        row_sum = sum_weights(weights, ones, row_sum)
        acc = hopper.warpgroup_mma(weights, values, acc, is_async=True)
        # The next step's scores; after the last step they are not used.
        next_stage = stage + 1
        next_phase = phase
        if next_stage == STAGES:
            next_stage = 0
            next_phase = phase ^ 1
        is_last = step + 1 == num_steps
        hopper.mbarrier.wait(keys_ready.index(next_stage), next_phase, pred=not is_last)
        keys = key_buffers.index(next_stage)
        scores = hopper.warpgroup_mma(q, keys.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        row_sum, acc, scores, weights = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc, scores, weights])
        thread_barrier()  # nobody of this group reads these values and the next keys any more
        hopper.mbarrier.arrive(values_free.index(stage))
        hopper.mbarrier.arrive(keys_free.index(next_stage), pred=not is_last)
        stage = next_stage
        phase = next_phase
        if (step % SPLIT_STEPS == SPLIT_STEPS - 1) | is_last:
            part_sum = split_sum(row_sum, score_row)
            total_max, total, result = join(total_max, total, result, row_max, part_sum, acc, scale_log2)
            row_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
            row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
            acc = gl.zeros([ROWS, DIM], gl.float32, acc_layout)

    row = FIRST_ROW + gl.arange(0, ROWS, acc_row)
    head = first_head + row % HEADS
    query = row // HEADS
    real = ((head < GROUP) & (query < count))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, acc_layout))[None, :]
    total = gl.convert_layout(total, acc_row, assert_trivial=True)
    result = result / gl.where(total > 0, total, 1.0)[:, None]
    target = out_ptr + ((q_row + query) * num_heads + kv_head * GROUP + head)[:, None] * DIM + column
    gl.store(target, result.to(out_ptr.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["num_requests"])
def gqa_hopper_wide_kernel(
    q_ptr,
    cache,
    block_tables_ptr,
    block_tables_stride,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    num_requests,
    num_heads,
    scale_log2,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    DIM: gl.constexpr,
    STEP_KEYS: gl.constexpr,
    SPLIT_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REQUESTS: gl.constexpr,
    KEY_START: gl.constexpr,
    NO_MAX: gl.constexpr,
    PDL: gl.constexpr,
):
    """As `_gqa_kernel` without BY_SPLIT. cache: descriptor in blocks of STEP_KEYS rows, a head's columns apart."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    tile = gl.program_id(0)
    each = gl.arange(0, REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
    starts = gl.load(query_start_loc_ptr + each, mask=each < num_requests, other=0) // QUERIES + each
    request = gl.sum(((starts <= tile) & (each < num_requests)).to(gl.int32), axis=0) - 1
    slot, q_row, count, position = tile_of_request(
        tile, request, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, QUERIES
    )
    num_keys = gl.where((slot >= 0) & (count > 0), position + count, 0)
    num_steps = (num_keys + STEP_KEYS - 1) // STEP_KEYS
    table_ptr = block_tables_ptr + gl.maximum(slot, 0) * block_tables_stride
    kv_head = gl.program_id(1) // PARTS
    first_head = (gl.program_id(1) % PARTS) * HEADS

    key_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, STEP_KEYS, DIM], shared_layout)
    value_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, STEP_KEYS, DIM], shared_layout)
    q = gl.allocate_shared_memory(DTYPE, [ROWS // 64, 64, DIM], shared_layout)
    ones = make_ones(STEP_KEYS, DTYPE, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(keys_ready.index(i), count=1)
        hopper.mbarrier.init(values_ready.index(i), count=1)
        hopper.mbarrier.init(keys_free.index(i), count=2)
        hopper.mbarrier.init(values_free.index(i), count=2)
    hopper.fence_async_shared()
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, out_ptr, q_row, count, position, num_keys, num_heads, kv_head, first_head, scale_log2, q,
                    ones, key_buffers, value_buffers, keys_ready, values_ready, keys_free, values_free, 0, GROUP, HEADS,
                    SPLIT_KEYS, STAGES, KEY_START, NO_MAX,
                ),
            ),
            (
                _consume,
                (
                    q_ptr, out_ptr, q_row, count, position, num_keys, num_heads, kv_head, first_head, scale_log2, q,
                    ones, key_buffers, value_buffers, keys_ready, values_ready, keys_free, values_free, 64, GROUP,
                    HEADS, SPLIT_KEYS, STAGES, KEY_START, NO_MAX,
                ),
            ),
            (
                _produce,
                (
                    cache, table_ptr, num_steps, kv_head * DIM, (KV_HEADS + kv_head) * DIM, key_buffers,
                    value_buffers, keys_ready, values_ready, keys_free, values_free, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
