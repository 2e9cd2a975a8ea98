"""Latent attention in its whole form on Hopper, with keys on their way while others are taken in.

The steps of `_mla_whole`, to the bit, by Gluon: a step's cache block is fetched by the tensor memory accelerator into
one of two buffers while the step before it is multiplied out of the other, which two buffers do not allow the compiler
of `_mla_whole` to do. A step is one block of the cache.
"""

# mypy: ignore-errors

from specgen.kernels._mla_common import NO_MAX, SUM_COLUMNS
from specgen.kernels._tiles import tile_of_request
from specgen.kernels._triton import gl, gluon, hopper, load_block, thread_barrier, wait_for_inputs


@gluon.jit
def _fetch(
    latents, ropes, block_ptr, buffer, latent_buffers, rope_buffers, ready, RANK: gl.constexpr, STEP_KEYS: gl.constexpr
):
    """Start copying a block of the cache into a buffer; `ready` is told."""
    row = gl.load(block_ptr) * STEP_KEYS
    barrier = ready.index(buffer)
    hopper.mbarrier.expect(barrier, latents.block_type.nbytes + ropes.block_type.nbytes)
    load_block(latents, [row, 0], barrier, latent_buffers.index(buffer))
    load_block(ropes, [row, RANK], barrier, rope_buffers.index(buffer))


@gluon.jit
def _clear_what_is_not_finite(buffer, RANK: gl.constexpr, layout: gl.constexpr):
    """Values that a rejected draft left may be anything, and 0 * NaN would reach the queries before it."""
    COLUMNS: gl.constexpr = 64
    for first in gl.static_range(0, RANK, COLUMNS):
        part = buffer.slice(first, COLUMNS, dim=1)
        values = part.load(layout)
        part.store(gl.where(gl.abs(values.to(gl.float32)) < float("inf"), values, gl.full_like(values, 0.0)))


@gluon.jit(do_not_specialize=["first_tile", "num_requests"])
def mla_hopper_kernel(
    q_ptr,
    latents,
    ropes,
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
    scale_log2,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    STEP_KEYS: gl.constexpr,
    SPLIT_KEYS: gl.constexpr,
    SPLITS: gl.constexpr,
    REQUESTS: gl.constexpr,
    KEY_START: gl.constexpr,
    PDL: gl.constexpr,
):
    """As `mla_split_kernel`. latents, ropes: descriptors of the cache in blocks of STEP_KEYS rows, columns apart."""
    ROWS: gl.constexpr = HEADS * QUERIES
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, STEP_KEYS // 2, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16])
    rope_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout(32, 16)
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    sum_row: gl.constexpr = gl.SliceLayout(1, sum_layout)

    tile = first_tile + gl.program_id(0)
    split = gl.program_id(2)
    each = gl.arange(0, REQUESTS, gl.BlockedLayout([1], [32], [8], [0]))
    starts = gl.load(query_start_loc_ptr + each, mask=each < num_requests, other=0) // QUERIES + each
    request = gl.sum(((starts <= tile) & (each < num_requests)).to(gl.int32), axis=0) - 1
    slot, q_row, count, position = tile_of_request(
        tile, request, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, QUERIES
    )
    position = gl.where(slot >= 0, position, -QUERIES)  # a padded request's rows see no key
    slot = gl.maximum(slot, 0)
    wait_for_inputs(PDL)  # the layout of the step is older than the kernel before this one
    low = split * SPLIT_KEYS
    end = gl.maximum(gl.minimum(low + SPLIT_KEYS, position + count), low)
    if (count > 0) & ((low < end) | (split == 0)):
        num_steps = (end - low + STEP_KEYS - 1) // STEP_KEYS
        # All rows see every key of the steps in [lead, full).
        lead = (KEY_START + STEP_KEYS - 1 - low) // STEP_KEYS
        full = (gl.minimum(position + 1, end) - low) // STEP_KEYS
        table_ptr = block_tables_ptr + slot * block_tables_stride + low // STEP_KEYS

        ready = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
        latent_buffers = gl.allocate_shared_memory(DTYPE, [2, STEP_KEYS, RANK], shared_layout)
        rope_buffers = gl.allocate_shared_memory(DTYPE, [2, STEP_KEYS, ROPE], shared_layout)
        for i in gl.static_range(2):
            hopper.mbarrier.init(ready.index(i), count=1)
        hopper.fence_async_shared()
        if num_steps > 0:
            _fetch(latents, ropes, table_ptr, 0, latent_buffers, rope_buffers, ready, RANK, STEP_KEYS)

        row = gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
        head = gl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        real = ((head < num_heads) & (query < count))[:, None]
        q_rows = q_ptr + ((q_row + query) * num_heads + head)[:, None] * (RANK + ROPE)
        column = gl.arange(0, RANK, gl.SliceLayout(0, copy_layout))[None, :]
        q_latent = gl.allocate_shared_memory(
            DTYPE, [ROWS, RANK], shared_layout, gl.load(q_rows + column, mask=real, other=0.0)
        )
        # In registers: shared memory would be full to the last few hundred bytes.
        row = gl.arange(0, ROWS, gl.SliceLayout(1, rope_layout))
        head = gl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        real = ((head < num_heads) & (query < count))[:, None]
        q_rows = q_ptr + ((q_row + query) * num_heads + head)[:, None] * (RANK + ROPE)
        rope_column = gl.arange(0, ROPE, gl.SliceLayout(0, rope_layout))[None, :]
        q_rope = gl.load(q_rows + RANK + rope_column, mask=real, other=0.0)
        weights_buffer = gl.allocate_shared_memory(DTYPE, [ROWS, STEP_KEYS], shared_layout)
        ones = gl.allocate_shared_memory(
            DTYPE, [STEP_KEYS, SUM_COLUMNS], ones_layout, gl.full([STEP_KEYS, SUM_COLUMNS], 1.0, DTYPE, copy_layout)
        )
        hopper.fence_async_shared()

        positions = position + gl.arange(0, ROWS, score_row) // HEADS
        row_max = gl.full([ROWS], NO_MAX, gl.float32, score_row)
        row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
        acc = gl.zeros([ROWS, RANK], gl.float32, acc_layout)
        no_scores = gl.zeros([ROWS, STEP_KEYS], gl.float32, scores_layout)
        for step in range(0, num_steps):
            buffer = step % 2
            thread_barrier()  # nobody reads the other buffer any more
            if step + 1 < num_steps:
                _fetch(
                    latents, ropes, table_ptr + step + 1, 1 - buffer, latent_buffers, rope_buffers, ready, RANK,
                    STEP_KEYS,
                )  # fmt: skip
            hopper.mbarrier.wait(ready.index(buffer), step // 2 % 2)
            latent = latent_buffers.index(buffer)
            is_edge = (step < lead) | (step >= full)
            if is_edge:
                _clear_what_is_not_finite(latent, RANK, copy_layout)
                hopper.fence_async_shared()
                thread_barrier()
            scores = hopper.warpgroup_mma(q_latent, latent.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma(q_rope, rope_buffers.index(buffer).permute([1, 0]), scores, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            if is_edge:
                key = low + step * STEP_KEYS + gl.arange(0, STEP_KEYS, gl.SliceLayout(0, scores_layout))
                in_range = (key < end) & (key >= KEY_START)
                visible = in_range[None, :] & (key[None, :] <= positions[:, None])
                scores = gl.where(visible, scores, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, axis=1))
            decay = gl.exp2((row_max - new_max) * scale_log2)
            weights = gl.exp2((scores - new_max[:, None]) * scale_log2).to(DTYPE)
            weights_buffer.store(weights)
            hopper.fence_async_shared()
            thread_barrier()
            row_max = new_max
            row_sum = row_sum * gl.convert_layout(decay, sum_row)[:, None]
            acc = acc * gl.convert_layout(decay, acc_row)[:, None]
            row_sum = hopper.warpgroup_mma(weights_buffer, ones, row_sum, is_async=True)
            acc = hopper.warpgroup_mma(weights_buffer, latent, acc, is_async=True)
            row_sum, acc = hopper.warpgroup_mma_wait(0, deps=[row_sum, acc])
        for i in gl.static_range(2):
            hopper.mbarrier.invalidate(ready.index(i))

        total = gl.convert_layout(gl.max(row_sum, axis=1), acc_row)  # its columns are equal
        row = gl.arange(0, ROWS, acc_row)
        head = gl.program_id(1) * HEADS + row % HEADS
        query = row // HEADS
        column = gl.arange(0, RANK, gl.SliceLayout(0, acc_layout))[None, :]
        if SPLITS == 1:
            result = acc / gl.where(total > 0, total, 1.0)[:, None]
            target = out_ptr + ((q_row + query) * num_heads + head)[:, None] * RANK + column
            real = ((head < num_heads) & (query < count))[:, None]
            gl.store(target, result.to(out_ptr.dtype.element_ty), mask=real)
        else:
            place = (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * SPLITS + split
            partial = partial_ptr + (place * ROWS + row) * (RANK + 2)
            gl.store(partial[:, None] + column, acc)
            gl.store(partial + RANK, gl.convert_layout(row_max, acc_row))
            gl.store(partial + RANK + 1, total)
