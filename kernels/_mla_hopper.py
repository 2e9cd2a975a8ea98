"""Latent attention in its whole form on Hopper: two blocks of keys in flight, each scored by a group of warps.

The steps of `_mla_whole`, to the bit, by Gluon. Warps of their own fetch the cache's blocks into two buffers. Group 0
scores blocks 0, 2, 4, ..., group 1 blocks 1, 3, 5, ..., and each hands its block's weights and the running maximum
after it to the other; each has half of the result's columns, for which it takes in all blocks in their order. So one
group multiplies while the other works out weights, and no step reads the queries twice.

A block lies in two halves of its columns. The left one is last read by group 0, the right one by group 1: each half is
filled again as soon as its own group is done with it. What a group hands over lies untouched until the other has read
it, because the group's next block can't come before: it takes the place of values that the other multiplies last.
"""

# mypy: ignore-errors

from specgen.kernels._hopper_attention import SUM_COLUMNS, find_latent_tile, hide_unseen
from specgen.kernels._mla_common import NO_MAX, split_range
from specgen.kernels._tiles import tile_place
from specgen.kernels._triton import gl, gluon, hopper, load_block, thread_barrier, wait_for_inputs


@gluon.jit
def _make_barriers(SLICES: gl.constexpr):
    """Return what tells that each slice of the two buffers is there, that each half is free, and (`told`) what is done.

    That is: the weights of group 0 are there, those of group 1, their sum, the queries of both.
    """
    ready = gl.allocate_shared_memory(gl.int64, [4 * SLICES + 2, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], hopper.mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [4, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * SLICES + 2):
        hopper.mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(4):
        hopper.mbarrier.init(free.index(i), count=1)
        hopper.mbarrier.init(told.index(i), count=2 if i == 3 else 1)
    hopper.fence_async_shared()
    return ready, free, told


@gluon.jit
def _produce(latents, ropes, table_ptr, num_steps, latent_buffers, rope_buffers, ready, free, STEP_KEYS: gl.constexpr):
    """Fill one half of a buffer after the other, each as soon as it is free; `ready` is told of every slice."""
    HALF: gl.constexpr = latent_buffers.shape[2]
    SLICE: gl.constexpr = latents.block_type.shape[1]
    SLICES: gl.constexpr = HALF // SLICE
    for step in range(0, num_steps):
        row = gl.load(table_ptr + step) * STEP_KEYS
        buffer = step % 2
        for half in gl.static_range(2):
            place = buffer * 2 + half
            hopper.mbarrier.wait(free.index(place), (step // 2 + 1) % 2)  # what was never used is free
            for i in gl.static_range(SLICES):
                barrier = ready.index(place * SLICES + i)
                hopper.mbarrier.expect(barrier, latents.block_type.nbytes)
                target = latent_buffers.index(place).slice(i * SLICE, SLICE, dim=1)
                load_block(latents, [row, half * HALF + i * SLICE], barrier, target)
        barrier = ready.index(4 * SLICES + buffer)
        hopper.mbarrier.expect(barrier, ropes.block_type.nbytes)
        load_block(ropes, [row, 2 * HALF], barrier, rope_buffers.index(buffer))


@gluon.jit
def _load_queries(q_ptr, q_row, count, num_heads, q_latent, told, half: gl.constexpr, HEADS: gl.constexpr):
    """Load half of the columns of the tile's queries to shared memory, and wait until the other group has, too.

    Returns the rotated columns, for which shared memory has no room.
    """
    ROWS: gl.constexpr = q_latent.shape[1]
    HALF: gl.constexpr = q_latent.shape[2]
    ROPE: gl.constexpr = 64
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
    width = 2 * HALF + ROPE
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
    head = gl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    real = ((head < num_heads) & (query < count))[:, None]
    column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, copy_layout))[None, :]
    latent = gl.load(q_ptr + ((q_row + query) * num_heads + head)[:, None] * width + column, mask=real, other=0.0)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, rope_layout))
    head = gl.program_id(1) * HEADS + row % HEADS
    query = row // HEADS
    real = ((head < num_heads) & (query < count))[:, None]
    column = 2 * HALF + gl.arange(0, ROPE, gl.SliceLayout(0, rope_layout))[None, :]
    q_rope = gl.load(q_ptr + ((q_row + query) * num_heads + head)[:, None] * width + column, mask=real, other=0.0)
    q_latent.index(half).store(latent)
    hopper.fence_async_shared()
    thread_barrier()
    hopper.mbarrier.arrive(told)
    hopper.mbarrier.wait(told, 0)
    return q_rope


@gluon.jit
def _zero(step):
    """Return 0, which the compiler can't know: what depends on it is worked out where it is used.

    Otherwise the descriptors of all operands would be kept in registers, of which there are not so many.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0; // $1", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _clear_what_is_not_finite(latent_buffers, ready, buffer, phase, SLICES: gl.constexpr):
    """Values that a rejected draft left may be anything, and 0 * NaN would reach the queries before it."""
    PART: gl.constexpr = 128
    SLICE: gl.constexpr = latent_buffers.shape[2] // SLICES
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for half in gl.static_range(2):
        place = buffer * 2 + half
        for i in gl.static_range(SLICES):
            hopper.mbarrier.wait(ready.index(place * SLICES + i), phase)
        for first in gl.static_range(0, SLICE * SLICES, PART):
            part = latent_buffers.index(place).slice(first, PART, dim=1)
            values = part.load(layout)
            part.store(gl.where(gl.abs(values.to(gl.float32)) < float("inf"), values, gl.full_like(values, 0.0)))
    hopper.fence_async_shared()
    thread_barrier()


@gluon.jit
def _scores(q_latent, q_rope, latent_buffers, rope_buffers, ready, buffer, zero, phase, SLICES: gl.constexpr):
    """Return the products of the queries and a block's keys, multiplied slice after slice as they come."""
    ROWS: gl.constexpr = q_latent.shape[1]
    HALF: gl.constexpr = q_latent.shape[2]
    SLICE: gl.constexpr = HALF // SLICES
    STEP_KEYS: gl.constexpr = latent_buffers.shape[1]
    scores = gl.zeros([ROWS, STEP_KEYS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16]))
    for half in gl.static_range(2):
        place = buffer * 2 + half
        for i in gl.static_range(SLICES):
            hopper.mbarrier.wait(ready.index(place * SLICES + i), phase)
            queries = q_latent.index(zero + half).slice(i * SLICE, SLICE, dim=1)
            keys = latent_buffers.index(zero + place).slice(i * SLICE, SLICE, dim=1).permute([1, 0])
            scores = hopper.warpgroup_mma(queries, keys, scores, use_acc=half + i > 0, is_async=True)
    hopper.mbarrier.wait(ready.index(4 * SLICES + buffer), phase)
    scores = hopper.warpgroup_mma(q_rope, rope_buffers.index(zero + buffer).permute([1, 0]), scores, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _hand_over(scores, new_max, scale_log2, weights, maximum, told):
    """Put a block's weights and the running maximum after it where the other group looks for them."""
    maximum.store(new_max)
    weights.store(gl.exp2((scores - new_max[:, None]) * scale_log2).to(weights.dtype))
    hopper.fence_async_shared()
    thread_barrier()
    hopper.mbarrier.arrive(told)


@gluon.jit
def _done(barrier):
    """Tell `barrier` that this group no longer reads something."""
    thread_barrier()
    hopper.mbarrier.arrive(barrier)


@gluon.jit
def _decay(row_max, new_max, scale_log2, layout: gl.constexpr):
    return gl.convert_layout(gl.exp2((row_max - new_max) * scale_log2), gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _store(
    acc, total, buffer, out_ptr, partial_ptr, q_row, count, num_heads, half: gl.constexpr, HEADS: gl.constexpr,
    BY_SPLIT: gl.constexpr,
):  # fmt: skip
    """Store half of the columns of the result, by a buffer that nobody uses any more; of the partial one if split."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    if not BY_SPLIT:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        buffer.store((acc / gl.where(total > 0, total, 1.0)[:, None]).to(buffer.dtype))
        thread_barrier()
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
        head = gl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        target = out_ptr + ((q_row + query) * num_heads + head)[:, None] * (2 * HALF) + column
        real = ((head < num_heads) & (query < count))[:, None]
        gl.store(target, buffer.load(layout), mask=real)
    else:
        layout: gl.constexpr = acc.type.layout
        column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
        gl.store(_partial_rows(partial_ptr, ROWS, HALF, layout)[:, None] + column, acc)


@gluon.jit
def _partial_rows(partial_ptr, ROWS: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr):
    """Return where the rows of the partial result lie."""
    place = tile_place() * gl.num_programs(2) + gl.program_id(2)
    return partial_ptr + (place * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))) * (2 * HALF + 2)


@gluon.jit
def _group_0(
    q_ptr, out_ptr, partial_ptr, q_row, count, position, low, end, lead, full, num_steps, num_heads, scale_log2,
    q_latent, latent_buffers, rope_buffers, weights, maxima, ones, ready, free, told, HEADS: gl.constexpr,
    SLICES: gl.constexpr, BY_SPLIT: gl.constexpr, KEY_START: gl.constexpr,
):  # fmt: skip
    """Score the even blocks; take in all blocks for the left columns, and the sum of the weights."""
    ROWS: gl.constexpr = q_latent.shape[1]
    HALF: gl.constexpr = q_latent.shape[2]
    STEP_KEYS: gl.constexpr = latent_buffers.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16]))
    q_rope = _load_queries(q_ptr, q_row, count, num_heads, q_latent, told.index(3), 0, HEADS)
    row_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
    row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
    acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
    for step in range(0, num_steps, 2):
        phase = step // 2 % 2
        zero = _zero(step)
        is_edge = (step < lead) | (step >= full)
        if is_edge:
            _clear_what_is_not_finite(latent_buffers, ready, 0, phase, SLICES)
        scores = _scores(q_latent, q_rope, latent_buffers, rope_buffers, ready, 0, zero, phase, SLICES)
        if is_edge:
            positions = position + gl.arange(0, ROWS, score_row) // HEADS
            scores = hide_unseen(scores, low + step * STEP_KEYS, end, positions, KEY_START)
        new_max = gl.maximum(row_max, gl.max(scores, axis=1))
        _hand_over(scores, new_max, scale_log2, weights.index(0), maxima.index(0), told.index(0))
        row_sum = row_sum * _decay(row_max, new_max, scale_log2, sum_layout)
        acc = acc * _decay(row_max, new_max, scale_log2, acc_layout)
        row_max = new_max
        row_sum = hopper.warpgroup_mma(weights.index(zero), ones, row_sum, is_async=True)
        acc = hopper.warpgroup_mma(weights.index(zero), latent_buffers.index(zero), acc, is_async=True)
        row_sum, acc = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc])
        _done(free.index(0))
        if step + 1 < num_steps:
            hopper.mbarrier.wait(told.index(1), phase)
            new_max = maxima.index(1).load(score_row)
            row_sum = row_sum * _decay(row_max, new_max, scale_log2, sum_layout)
            acc = acc * _decay(row_max, new_max, scale_log2, acc_layout)
            row_max = new_max
            row_sum = hopper.warpgroup_mma(weights.index(zero + 1), ones, row_sum, is_async=True)
            acc = hopper.warpgroup_mma(weights.index(zero + 1), latent_buffers.index(zero + 2), acc, is_async=True)
            row_sum, acc = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc])
            _done(free.index(2))
    total = gl.convert_layout(gl.max(row_sum, axis=1), gl.SliceLayout(1, acc_layout))  # its columns are equal
    maxima.index(2).store(total)
    _done(told.index(2))
    _store(acc, total, latent_buffers.index(0), out_ptr, partial_ptr, q_row, count, num_heads, 0, HEADS, BY_SPLIT)
    if BY_SPLIT:
        partial = _partial_rows(partial_ptr, ROWS, HALF, acc_layout)
        gl.store(partial + 2 * HALF, gl.convert_layout(row_max, gl.SliceLayout(1, acc_layout)))
        gl.store(partial + 2 * HALF + 1, total)


@gluon.jit
def _group_1(
    q_ptr, out_ptr, partial_ptr, q_row, count, position, low, end, lead, full, num_steps, num_heads, scale_log2,
    q_latent, latent_buffers, rope_buffers, weights, maxima, ready, free, told, HEADS: gl.constexpr,
    SLICES: gl.constexpr, BY_SPLIT: gl.constexpr, KEY_START: gl.constexpr,
):  # fmt: skip
    """Score the odd blocks; take in all blocks for the right columns."""
    ROWS: gl.constexpr = q_latent.shape[1]
    HALF: gl.constexpr = q_latent.shape[2]
    STEP_KEYS: gl.constexpr = latent_buffers.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16]))
    q_rope = _load_queries(q_ptr, q_row, count, num_heads, q_latent, told.index(3), 1, HEADS)
    row_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
    acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
    for step in range(1, num_steps, 2):
        phase = step // 2 % 2
        zero = _zero(step)
        is_edge = (step < lead) | (step >= full)
        if is_edge:
            _clear_what_is_not_finite(latent_buffers, ready, 1, phase, SLICES)
        scores = _scores(q_latent, q_rope, latent_buffers, rope_buffers, ready, 1, zero, phase, SLICES)
        if is_edge:
            positions = position + gl.arange(0, ROWS, score_row) // HEADS
            scores = hide_unseen(scores, low + step * STEP_KEYS, end, positions, KEY_START)
        own_max = gl.max(scores, axis=1)
        hopper.mbarrier.wait(told.index(0), phase)
        new_max = maxima.index(0).load(score_row)
        acc = acc * _decay(row_max, new_max, scale_log2, acc_layout)
        row_max = new_max
        acc = hopper.warpgroup_mma(weights.index(zero), latent_buffers.index(zero + 1), acc, is_async=True)
        new_max = gl.maximum(row_max, own_max)
        _hand_over(scores, new_max, scale_log2, weights.index(1), maxima.index(1), told.index(1))
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        _done(free.index(1))
        acc = acc * _decay(row_max, new_max, scale_log2, acc_layout)
        row_max = new_max
        acc = hopper.warpgroup_mma(weights.index(zero + 1), latent_buffers.index(zero + 3), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        _done(free.index(3))
    if num_steps % 2 == 1:  # the last block has no partner
        hopper.mbarrier.wait(told.index(0), num_steps // 2 % 2)
        new_max = maxima.index(0).load(score_row)
        acc = acc * _decay(row_max, new_max, scale_log2, acc_layout)
        acc = hopper.warpgroup_mma(weights.index(0), latent_buffers.index(1), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    hopper.mbarrier.wait(told.index(2), 0)
    total = maxima.index(2).load(gl.SliceLayout(1, acc_layout))
    _store(acc, total, latent_buffers.index(3), out_ptr, partial_ptr, q_row, count, num_heads, 1, HEADS, BY_SPLIT)


@gluon.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_hopper_kernel(
    q_ptr, latents, ropes, block_tables_ptr, block_tables_stride, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr,
    out_ptr, partial_ptr, first_tile, num_requests, num_heads, scale_log2, HEADS: gl.constexpr, QUERIES: gl.constexpr,
    RANK: gl.constexpr, ROPE: gl.constexpr, STEP_KEYS: gl.constexpr, SPLIT_KEYS: gl.constexpr, BY_SPLIT: gl.constexpr,
    REQUESTS: gl.constexpr, KEY_START: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mla_split_kernel`. latents, ropes: descriptors of the cache in blocks of STEP_KEYS rows.

    A block of latents is a slice of columns, 64, 128 or 256 wide, which is multiplied as soon as it is there. Launched
    with 4 warps, which become the fetching ones (one would do, but warps take registers in fours); 8 more are started.
    """
    ROWS: gl.constexpr = HEADS * QUERIES
    HALF: gl.constexpr = RANK // 2
    SLICES: gl.constexpr = HALF // latents.block_type.shape[1]
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    tile = first_tile + gl.program_id(0)
    split = gl.program_id(2)
    slot, q_row, count, position = find_latent_tile(
        tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    wait_for_inputs(PDL)  # the layout of the step is older than the layer
    low, end, works = split_range(split, position, count, SPLIT_KEYS)
    if works:
        num_steps = (end - low + STEP_KEYS - 1) // STEP_KEYS
        # All rows see every key of the steps in [lead, full).
        lead = (KEY_START + STEP_KEYS - 1 - low) // STEP_KEYS
        full = (gl.minimum(position + 1, end) - low) // STEP_KEYS
        table_ptr = block_tables_ptr + slot * block_tables_stride + low // STEP_KEYS

        q_latent = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], shared_layout)
        latent_buffers = gl.allocate_shared_memory(DTYPE, [4, STEP_KEYS, HALF], shared_layout)
        rope_buffers = gl.allocate_shared_memory(DTYPE, [2, STEP_KEYS, ROPE], shared_layout)
        weights = gl.allocate_shared_memory(DTYPE, [2, ROWS, STEP_KEYS], shared_layout)
        ones = gl.allocate_shared_memory(
            DTYPE, [SUM_COLUMNS, STEP_KEYS], shared_layout, gl.full([SUM_COLUMNS, STEP_KEYS], 1.0, DTYPE, copy_layout)
        )
        # Of a block of group 0, of group 1; the sum of the weights.
        maxima = gl.allocate_shared_memory(gl.float32, [3, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready, free, told = _make_barriers(SLICES)

        gl.warp_specialize(
            [
                (
                    _produce,
                    (
                        latents, ropes, table_ptr, num_steps, latent_buffers, rope_buffers, ready, free, STEP_KEYS,
                    ),
                ),
                (
                    _group_0,
                    (
                        q_ptr, out_ptr, partial_ptr, q_row, count, position, low, end, lead, full, num_steps,
                        num_heads, scale_log2, q_latent, latent_buffers, rope_buffers, weights, maxima,
                        ones.permute([1, 0]), ready, free, told, HEADS, SLICES, BY_SPLIT, KEY_START,
                    ),
                ),
                (
                    _group_1,
                    (
                        q_ptr, out_ptr, partial_ptr, q_row, count, position, low, end, lead, full, num_steps,
                        num_heads, scale_log2, q_latent, latent_buffers, rope_buffers, weights, maxima, ready, free,
                        told, HEADS, SLICES, BY_SPLIT, KEY_START,
                    ),
                ),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
