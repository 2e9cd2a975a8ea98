"""What the attentions' forms for Hopper share, in Gluon: tiles, blocks of the cache, and how scores are taken in."""

# mypy: ignore-errors

from specgen.kernels._tiles import tile_of_request
from specgen.kernels._triton import gl, gluon, hopper, load_block, thread_barrier, tl

SUM_COLUMNS = tl.constexpr(8)  # the narrowest product


@gluon.jit
def find_tile(
    tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES: gl.constexpr,
    REQUESTS: gl.constexpr,
):  # fmt: skip
    """As `_tiles.find_tile`, for 4 warps."""
    each = gl.arange(0, REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
    starts = gl.load(query_start_loc_ptr + each, mask=each < num_requests, other=0) // QUERIES + each
    request = gl.sum(((starts <= tile) & (each < num_requests)).to(gl.int32), axis=0) - 1
    return tile_of_request(tile, request, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, QUERIES)


@gluon.jit
def find_latent_tile(
    tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES: gl.constexpr,
    REQUESTS: gl.constexpr,
):  # fmt: skip
    """As `_mla_common.find_tile`, for 4 warps."""
    slot, q_row, count, position = find_tile(
        tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES, REQUESTS
    )
    position = gl.where(slot >= 0, position, -QUERIES)  # a padded request's rows see no key
    return gl.maximum(slot, 0), q_row, count, position


@gluon.jit
def fetch(cache, block, column, buffer, barrier, needed):
    """Start copying a block's keys or values of one head into a stage, if they are needed; `barrier` is told."""
    hopper.mbarrier.expect(barrier, cache.block_type.nbytes, pred=needed)
    row = block * cache.block_type.shape[0]
    load_block(cache, [row, column], barrier, buffer, pred=needed)


@gluon.jit
def clear_unseen(values, start, end, KEY_START: gl.constexpr, layout: gl.constexpr):
    """Clear what is out of range or not finite, before products see it.

    A rejected draft left it, and 0 * NaN would reach earlier queries.
    """
    STEP_KEYS: gl.constexpr = values.shape[0]
    DIM: gl.constexpr = values.shape[1]
    COLUMNS: gl.constexpr = 64
    key = start + gl.arange(0, STEP_KEYS, gl.SliceLayout(1, layout))
    in_range = ((key < end) & (key >= KEY_START))[:, None]
    for first in gl.static_range(0, DIM, COLUMNS):
        part = values.slice(first, COLUMNS, dim=1)
        value = part.load(layout)
        keep = in_range & (gl.abs(value.to(gl.float32)) < float("inf"))
        part.store(gl.where(keep, value, gl.full_like(value, 0.0)))
    hopper.fence_async_shared()
    thread_barrier()


@gluon.jit
def hide_unseen(scores, start, end, positions, KEY_START: gl.constexpr):
    """Return the scores of the keys from `start` on, -inf where a row may not see the key."""
    key = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    visible = ((key < end) & (key >= KEY_START))[None, :] & (key[None, :] <= positions[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def nothing_seen(ROWS: gl.constexpr, STEP_KEYS: gl.constexpr, COLUMNS: gl.constexpr, NO_MAX: gl.constexpr):
    """Return the (row_max, row_sum, acc) of rows that have taken in no key; acc has COLUMNS columns."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_KEYS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row_max = gl.full([ROWS], NO_MAX, gl.float32, gl.SliceLayout(1, scores_layout))
    row_sum = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, sum_layout)
    return row_max, row_sum, gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)


@gluon.jit
def weigh(scores, row_max, row_sum, acc, scale_log2, DTYPE: gl.constexpr):
    """Return (weights of DTYPE as a product's left side, row_max, row_sum and acc ready for the weights' products)."""
    acc_layout: gl.constexpr = acc.type.layout
    sum_layout: gl.constexpr = row_sum.type.layout
    weights, decay, new_max = weigh_step(scores, row_max, scale_log2, DTYPE)
    row_sum = row_sum * _rows_of(decay, sum_layout)[:, None]
    acc = acc * _rows_of(decay, acc_layout)[:, None]
    return gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2)), new_max, row_sum, acc


@gluon.jit
def weigh_step(scores, row_max, scale_log2, DTYPE: gl.constexpr):
    """Return (a step's weights of DTYPE, the factor of what came before, the rows' maximum after it)."""
    new_max = gl.maximum(row_max, gl.max(scores, axis=1))
    decay = gl.exp2((row_max - new_max) * scale_log2)
    return gl.exp2((scores - new_max[:, None]) * scale_log2).to(DTYPE), decay, new_max


@gluon.jit
def _rows_of(values, layout: gl.constexpr):
    """Return values of rows where the rows of a tile of another width are: in the same threads."""
    return gl.convert_layout(values, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def sum_weights(weights, ones, row_sum):
    """Start adding a step's weights: products of half of the keys with ones, all of whose columns are the sum."""
    sum_layout: gl.constexpr = row_sum.type.layout
    left_side: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    ROWS: gl.constexpr = weights.shape[0]
    HALF: gl.constexpr = weights.shape[1] // 2
    first, second = weights.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    first = gl.convert_layout(first, left_side, assert_trivial=True)
    second = gl.convert_layout(second, left_side, assert_trivial=True)
    row_sum = hopper.warpgroup_mma(first, ones, row_sum, is_async=True)
    return hopper.warpgroup_mma(second, ones, row_sum, is_async=True)


@gluon.jit
def make_ones(STEP_KEYS: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Return ones in shared memory, as `sum_weights` multiplies by; products see all that was written there before.

    They are half as many as the keys: with more, two tiles would not fit.
    """
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(64, 16)
    values = gl.full([SUM_COLUMNS, STEP_KEYS // 2], 1.0, DTYPE, layout)
    ones = gl.allocate_shared_memory(DTYPE, [SUM_COLUMNS, STEP_KEYS // 2], shared_layout, values)
    hopper.fence_async_shared()
    thread_barrier()
    return ones.permute([1, 0])


@gluon.jit
def split_sum(row_sum, layout: gl.constexpr):
    """Return the sums of a split's weights, whose columns are equal, as a row of `layout`."""
    return gl.convert_layout(gl.max(row_sum, axis=1), layout, assert_trivial=True)
