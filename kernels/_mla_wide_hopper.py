"""Latent attention's wide form on Hopper: the steps of `_mla_wide`, to the bit, by Gluon.

The second kernel's values are on their way before the first has ended: the cache is older than that one. A step's
scores come to the registers that the product takes weights from, so a step is a short chain.
"""

# mypy: ignore-errors

from specgen.kernels._hopper_attention import (
    clear_unseen,
    fetch,
    find_latent_tile,
    hide_unseen,
    make_ones,
    nothing_seen,
    split_sum,
    sum_weights,
    weigh,
)
from specgen.kernels._mla_common import NO_MAX, split_range
from specgen.kernels._tiles import tile_place
from specgen.kernels._triton import gl, gluon, hopper, load_block, next_stage_of, thread_barrier, wait_for_inputs


@gluon.jit
def _load_queries(
    q_ptr, q_row, count, num_heads, HEADS: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    SLICE: gl.constexpr,
):  # fmt: skip
    """Return the tile's queries (for the latents, for the rotated keys) in shared memory, zeros where there is none."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
    head = gl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    real = ((head < num_heads) & (query < count))[:, None]
    q_rows = q_ptr + ((q_row + query) * num_heads + head)[:, None] * (RANK + ROPE)
    column = gl.arange(0, SLICE, gl.SliceLayout(0, copy_layout))[None, :]
    q_latent = gl.allocate_shared_memory(DTYPE, [ROWS, RANK], shared_layout)
    for first in gl.static_range(0, RANK, SLICE):
        part = gl.load(q_rows + first + column, mask=real, other=0.0)
        q_latent.slice(first, SLICE, dim=1).store(part)
    column = gl.arange(0, ROPE, gl.SliceLayout(0, copy_layout))[None, :]
    part = gl.load(q_rows + RANK + column, mask=real, other=0.0)
    return q_latent, gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], shared_layout, part)


@gluon.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_scores_hopper_kernel(
    q_ptr, latents, ropes, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    scores_ptr, first_tile, num_requests, num_heads, HEADS: gl.constexpr, QUERIES: gl.constexpr, RANK: gl.constexpr,
    ROPE: gl.constexpr, STEP_KEYS: gl.constexpr, REQUESTS: gl.constexpr, KEY_START: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mla_scores_kernel`. latents, ropes: descriptors of the cache in blocks of STEP_KEYS rows. 4 warps."""
    ROWS: gl.constexpr = HEADS * QUERIES
    SLICE: gl.constexpr = latents.block_type.shape[1]
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    slot, q_row, count, position = find_latent_tile(
        first_tile + gl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES,
        REQUESTS,
    )  # fmt: skip
    step = gl.program_id(2)
    start = step * STEP_KEYS
    end = position + count
    needed = (count > 0) & (start < end)
    key_latent = gl.allocate_shared_memory(DTYPE, [STEP_KEYS, RANK], shared_layout)
    key_rope = gl.allocate_shared_memory(DTYPE, [STEP_KEYS, ROPE], shared_layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(ready.index(0), count=1)
    hopper.fence_async_shared()
    block_row = gl.load(block_tables_ptr + slot * block_tables_stride + step, mask=needed, other=0) * STEP_KEYS
    wait_for_inputs(PDL)
    hopper.mbarrier.expect(ready.index(0), STEP_KEYS * (RANK + ROPE) * 2, pred=needed)
    for first in gl.static_range(0, RANK, SLICE):
        load_block(
            latents, [block_row, first], ready.index(0), key_latent.slice(first, SLICE, dim=1), pred=needed
        )  # fmt: skip
    load_block(ropes, [block_row, RANK], ready.index(0), key_rope, pred=needed)
    if needed:
        q_latent, q_rope = _load_queries(q_ptr, q_row, count, num_heads, HEADS, ROWS, RANK, ROPE, SLICE)
        hopper.fence_async_shared()
        thread_barrier()
        hopper.mbarrier.wait(ready.index(0), 0)
        scores = gl.zeros([ROWS, STEP_KEYS], gl.float32, scores_layout)
        scores = hopper.warpgroup_mma(q_latent, key_latent.permute([1, 0]), scores, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma(q_rope, key_rope.permute([1, 0]), scores, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        row = gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        scores = hide_unseen(scores, start, end, position + row // HEADS, KEY_START)
        place = tile_place() * gl.num_programs(2) + step
        column = gl.arange(0, STEP_KEYS, gl.SliceLayout(0, scores_layout))
        gl.store(scores_ptr + (place * ROWS + row)[:, None] * STEP_KEYS + column[None, :], scores)


@gluon.jit
def _start_ring(cache, table_ptr, num_steps, column, STAGES: gl.constexpr):
    """Return (values, what tells that they are there) of STAGES stages, the first blocks on their way to them."""
    STEP_KEYS: gl.constexpr = cache.block_type.shape[0]
    COLUMNS: gl.constexpr = cache.block_type.shape[1]
    values = gl.allocate_shared_memory(cache.dtype, [STAGES, STEP_KEYS, COLUMNS], cache.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    for i in gl.static_range(STAGES):
        block = gl.load(table_ptr + i, mask=i < num_steps, other=0)
        fetch(cache, block, column, values.index(i), ready.index(i), i < num_steps)
    return values, ready


@gluon.jit
def _keep_partial(partial, row_max, total, acc, column, first_column, RANK: gl.constexpr):
    """Store a slice of a split's acc in the rows `partial`, and max and sum if it is the first slice."""
    gl.store(partial[:, None] + column, acc)
    if first_column == 0:
        gl.store(partial + RANK, gl.convert_layout(row_max, total.type.layout, assert_trivial=True))
        gl.store(partial + RANK + 1, total)


@gluon.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_values_hopper_kernel(
    scores_ptr, cache, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, first_tile, num_requests, num_steps, num_heads, scale_log2, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, RANK: gl.constexpr, STEP_KEYS: gl.constexpr, SPLIT_KEYS: gl.constexpr, STAGES: gl.constexpr,
    BY_SPLIT: gl.constexpr, REQUESTS: gl.constexpr, KEY_START: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mla_values_kernel`. cache: descriptor of the cache in blocks of STEP_KEYS rows and a slice of columns."""
    ROWS: gl.constexpr = HEADS * QUERIES
    SLICE: gl.constexpr = cache.block_type.shape[1]
    SLICES: gl.constexpr = RANK // SLICE
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    slot, q_row, count, position = find_latent_tile(
        first_tile + gl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES,
        REQUESTS,
    )  # fmt: skip
    split = gl.program_id(2) // SLICES
    first_column = (gl.program_id(2) % SLICES) * SLICE
    low, end, works = split_range(split, position, count, SPLIT_KEYS)
    steps = gl.where(works, (end - low + STEP_KEYS - 1) // STEP_KEYS, 0)
    table_ptr = block_tables_ptr + slot * block_tables_stride + low // STEP_KEYS

    buffers, ready = _start_ring(cache, table_ptr, steps, first_column, STAGES)
    ones = make_ones(STEP_KEYS, DTYPE, copy_layout)
    wait_for_inputs(PDL)  # what the scores' kernel read had been written before it went on
    if works:
        # All rows see every key of the steps in [lead, full).
        lead = (KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS
        full = gl.minimum(position + 1, end)
        place = tile_place()
        row = gl.arange(0, ROWS, score_row)
        column = gl.arange(0, STEP_KEYS, gl.SliceLayout(0, scores_layout))
        step_scores = scores_ptr + (place * num_steps + low // STEP_KEYS) * ROWS * STEP_KEYS
        step_scores += row[:, None] * STEP_KEYS + column[None, :]
        last = gl.maximum(steps - 1, 0)
        next_scores = gl.load(step_scores)
        scores_after = gl.load(step_scores + gl.minimum(1, last) * (ROWS * STEP_KEYS))
        row_max, row_sum, acc = nothing_seen(ROWS, STEP_KEYS, SLICE, NO_MAX)
        stage = 0
        phase = 0
        for step in range(0, steps):
            start = low + step * STEP_KEYS
            ahead = step + STAGES
            block = gl.load(table_ptr + ahead, mask=ahead < steps, other=0)
            scores = next_scores
            next_scores = scores_after
            scores_after = gl.load(step_scores + gl.minimum(step + 2, last) * (ROWS * STEP_KEYS))
            weights, row_max, row_sum, acc = weigh(scores, row_max, row_sum, acc, scale_log2, DTYPE)
            values = buffers.index(stage)
            hopper.mbarrier.wait(ready.index(stage), phase)
            if (start < lead) | (start + STEP_KEYS > full):
                clear_unseen(values, start, end, KEY_START, copy_layout)
            row_sum = sum_weights(weights, ones, row_sum)
            acc = hopper.warpgroup_mma(weights, values, acc, is_async=True)
            row_sum, acc, weights = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc, weights])
            thread_barrier()  # nobody reads these values any more
            fetch(cache, block, first_column, values, ready.index(stage), ahead < steps)
            stage, phase = next_stage_of(stage, phase, STAGES)
        total = split_sum(row_sum, acc_row)
        row = gl.arange(0, ROWS, acc_row)
        column = first_column + gl.arange(0, SLICE, gl.SliceLayout(0, acc_layout))[None, :]
        if BY_SPLIT:
            place = place * (gl.num_programs(2) // SLICES) + split
            partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
            _keep_partial(partial, row_max, total, acc, column, first_column, RANK)
        else:
            head = gl.program_id(1) * HEADS + row % HEADS
            query = row // HEADS
            result = acc / gl.where(total > 0, total, 1.0)[:, None]
            target = out_ptr + ((q_row + query) * num_heads + head)[:, None] * RANK + column
            real = (head < num_heads) & (query < count)
            gl.store(target, result.to(DTYPE), mask=real[:, None])
