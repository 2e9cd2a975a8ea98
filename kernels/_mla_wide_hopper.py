"""Latent attention's wide form on Hopper: the steps of `_mla_wide`, to the bit, by Gluon.

The second kernel's values are on their way before the first has ended: the cache is older than that one. Warps of their
own work out the weights of the steps ahead while the others multiply, which wait for nothing else then.
"""

# mypy: ignore-errors

from specgen.kernels._hopper_attention import (
    SUM_COLUMNS,
    clear_unseen,
    fetch,
    find_latent_tile,
    hide_unseen,
    split_sum,
    weigh_step,
)
from specgen.kernels._mla_common import NO_MAX, split_range
from specgen.kernels._tiles import tile_place
from specgen.kernels._triton import gl, gluon, hopper, load_block, thread_barrier, wait_for_inputs


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
    wait_for_inputs(PDL)  # and not earlier: the values' kernel reads keys before it waits
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
def _weigh_steps(step_scores, steps, scale_log2, weights, decays, row_max, told, free):
    """Work out a step's weights and the factor of what came before, one step after the other, for `_multiply`."""
    SLOTS: gl.constexpr = weights.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    ROWS: gl.constexpr = weights.shape[1]
    STEP_KEYS: gl.constexpr = weights.shape[2]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    scores_ptr = step_scores + row * STEP_KEYS + gl.arange(0, STEP_KEYS, gl.SliceLayout(0, layout))[None, :]
    last = gl.maximum(steps - 1, 0)  # a padded request's rows see no step
    # Two steps a turn, so that scores come to registers of their own while the others are looked at.
    even = gl.load(scores_ptr)
    odd = gl.load(scores_ptr + gl.minimum(1, last) * (ROWS * STEP_KEYS))
    highest = gl.full([ROWS], NO_MAX, gl.float32, gl.SliceLayout(1, layout))
    for step in range(0, steps, 2):
        scores = even
        even = gl.load(scores_ptr + gl.minimum(step + 2, last) * (ROWS * STEP_KEYS))
        highest = _hand_over(scores, highest, scale_log2, weights, decays, told, free, step % SLOTS, step // SLOTS)
        if step + 1 < steps:
            scores = odd
            odd = gl.load(scores_ptr + gl.minimum(step + 3, last) * (ROWS * STEP_KEYS))
            highest = _hand_over(
                scores, highest, scale_log2, weights, decays, told, free, (step + 1) % SLOTS, (step + 1) // SLOTS
            )
    row_max.store(highest)
    thread_barrier()
    hopper.mbarrier.arrive(told.index(SLOTS))


@gluon.jit
def _hand_over(scores, highest, scale_log2, weights, decays, told, free, slot, turn):
    """Put a step's weights and the factor of what came before into a slot; return the rows' maximum after it."""
    step_weights, decay, highest = weigh_step(scores, highest, scale_log2, weights.dtype)
    hopper.mbarrier.wait(free.index(slot), (turn + 1) % 2)  # what was never used is free
    weights.index(slot).store(step_weights)
    decays.index(slot).store(decay)
    hopper.fence_async_shared()
    thread_barrier()
    hopper.mbarrier.arrive(told.index(slot))
    return highest


@gluon.jit
def _multiply(
    cache, table_ptr, out_ptr, partial_ptr, q_row, count, num_heads, split, first_column, low, end, full, steps,
    buffers, ready, ones, weights, decays, row_max, told, free, HEADS: gl.constexpr, RANK: gl.constexpr,
    BY_SPLIT: gl.constexpr, KEY_START: gl.constexpr,
):  # fmt: skip
    """Take in the steps' values by the weights that the other warps hand over; store the result or the split's part."""
    SLOTS: gl.constexpr = weights.shape[0]
    STAGES: gl.constexpr = buffers.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    STEP_KEYS: gl.constexpr = buffers.shape[1]
    SLICE: gl.constexpr = buffers.shape[2]
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    # All rows see every key of the steps in [lead, full).
    lead = (KEY_START + STEP_KEYS - 1) // STEP_KEYS * STEP_KEYS
    row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
    acc = gl.zeros([ROWS, SLICE], gl.float32, acc_layout)
    for step in range(0, steps):
        start = low + step * STEP_KEYS
        ahead = step + STAGES
        block = gl.load(table_ptr + ahead, mask=ahead < steps, other=0)
        slot = step % SLOTS
        stage = step % STAGES
        values = buffers.index(stage)
        hopper.mbarrier.wait(ready.index(stage), step // STAGES % 2)
        if (start < lead) | (start + STEP_KEYS > full):
            clear_unseen(values, start, end, KEY_START, copy_layout)
        hopper.mbarrier.wait(told.index(slot), step // SLOTS % 2)
        row_sum = row_sum * decays.index(slot).load(gl.SliceLayout(1, sum_layout))[:, None]
        acc = acc * decays.index(slot).load(acc_row)[:, None]
        row_sum = hopper.warpgroup_mma(weights.index(slot), ones, row_sum, is_async=True)
        acc = hopper.warpgroup_mma(weights.index(slot), values, acc, is_async=True)
        row_sum, acc = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc])
        thread_barrier()  # nobody reads these values and weights any more
        hopper.mbarrier.arrive(free.index(slot))
        fetch(cache, block, first_column, values, ready.index(stage), ahead < steps)
    total = split_sum(row_sum, acc_row)
    row = gl.arange(0, ROWS, acc_row)
    column = first_column + gl.arange(0, SLICE, gl.SliceLayout(0, acc_layout))[None, :]
    if BY_SPLIT:
        place = tile_place() * (gl.num_programs(2) // (RANK // SLICE)) + split
        partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
        gl.store(partial[:, None] + column, acc)
        hopper.mbarrier.wait(told.index(SLOTS), 0)
        if first_column == 0:
            gl.store(partial + RANK, row_max.load(acc_row))
            gl.store(partial + RANK + 1, total)
    else:
        head = gl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        result = acc / gl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + ((q_row + query) * num_heads + head)[:, None] * RANK + column
        real = (head < num_heads) & (query < count)
        gl.store(target, result.to(out_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["first_tile", "num_requests", "num_steps"])
def mla_values_hopper_kernel(
    scores_ptr, cache, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, first_tile, num_requests, num_steps, num_heads, scale_log2, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, RANK: gl.constexpr, STEP_KEYS: gl.constexpr, SPLIT_KEYS: gl.constexpr, STAGES: gl.constexpr,
    BY_SPLIT: gl.constexpr, REQUESTS: gl.constexpr, KEY_START: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mla_values_kernel`. cache: descriptor of the cache in blocks of STEP_KEYS rows and a slice of columns.

    Launched with 4 warps, which multiply; 8 more are started for the weights.
    """
    SLOTS: gl.constexpr = 4
    ROWS: gl.constexpr = HEADS * QUERIES
    SLICES: gl.constexpr = RANK // cache.block_type.shape[1]
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot, q_row, count, position = find_latent_tile(
        first_tile + gl.program_id(0), idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES,
        REQUESTS,
    )  # fmt: skip
    split = gl.program_id(2) // SLICES
    first_column = (gl.program_id(2) % SLICES) * cache.block_type.shape[1]
    low, end, works = split_range(split, position, count, SPLIT_KEYS)
    steps = gl.where(works, (end - low + STEP_KEYS - 1) // STEP_KEYS, 0)
    table_ptr = block_tables_ptr + slot * block_tables_stride + low // STEP_KEYS

    buffers, ready = _start_ring(cache, table_ptr, steps, first_column, STAGES)
    weights = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, STEP_KEYS], shared_layout)
    decays = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row_max = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ones = gl.allocate_shared_memory(
        DTYPE, [SUM_COLUMNS, STEP_KEYS], shared_layout, gl.full([SUM_COLUMNS, STEP_KEYS], 1.0, DTYPE, copy_layout)
    )
    told = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        hopper.mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(SLOTS + 1):
        hopper.mbarrier.init(told.index(i), count=1)
    hopper.fence_async_shared()
    wait_for_inputs(PDL)  # what the scores' kernel read had been written before it went on
    if works:
        full = gl.minimum(position + 1, end)
        step_scores = scores_ptr + (tile_place() * num_steps + low // STEP_KEYS) * ROWS * STEP_KEYS
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        cache, table_ptr, out_ptr, partial_ptr, q_row, count, num_heads, split, first_column, low, end,
                        full, steps, buffers, ready, ones.permute([1, 0]), weights, decays, row_max, told, free, HEADS,
                        RANK, BY_SPLIT, KEY_START,
                    ),
                ),
                (_weigh_steps, (step_scores, steps, scale_log2, weights, decays, row_max, told, free)),
            ],
            [8],
            [112],
        )  # fmt: skip
