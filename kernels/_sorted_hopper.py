"""Products of sorted rows on Hopper: `_sorted_experts` in Gluon.

A program takes one item after the other: a tile (rows of one expert) and some columns of its weight, the columns of a
tile next to each other, so that programs that run at once share weights and rows. One warp fetches blocks into a ring
of stages, the others multiply what is there; the ring does not stop at the end of an item, so that while a result is
stored the next item's blocks are on their way. A block of weights in shared memory has COLUMNS rows; gated, COLUMNS of
gate and then as many of up.

A tile of 128 rows stands on the left of the product and eight warps multiply it. A lower one stands on the right, where
it may be as low as an expert has rows, and four warps multiply: reading the weights is what takes time.
"""

# mypy: ignore-errors

from typing import Any

from specgen.kernels._triton import gl, gluon, hopper, load_block, next_stage_of, thread_barrier, wait_for_inputs

TALL = 128  # the height of a tile on the left


def store_layout(rows: int, columns: int) -> Any:
    """Return the layout in which 8 warps store a tile: each the 16 rows it multiplied, each thread 16 bytes at once.

    So results change hands within a warp only.
    """
    assert rows == TALL
    bits = [1 << i for i in range(columns.bit_length() - 1)]
    registers = [[0, bit] for bit in bits[:3] + bits[5:]] + [[8, 0]]
    lanes = [[0, bit] for bit in bits[3:5]] + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [rows, columns])


@gluon.jit
def _fetch_weights(weights, block_row, start, buffer, barrier, num_columns, needed, GATED: gl.constexpr):
    """Start copying a step's weights into a stage; `barrier` is told."""
    COLUMNS: gl.constexpr = weights.block_type.shape[0]
    if GATED:
        gate, up = buffer.slice(0, COLUMNS), buffer.slice(COLUMNS, COLUMNS)
        load_block(weights, [block_row, start], barrier, gate, pred=needed)
        load_block(weights, [block_row + num_columns, start], barrier, up, pred=needed)
    else:
        load_block(weights, [block_row, start], barrier, buffer, pred=needed)


@gluon.jit
def _store_tall(
    acc, out_ptr, tiles_ptr, max_tiles, item, columns, num_columns, layout: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Store an item's result; rows and columns beyond its end belong to others."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:  # rounded as two separate products would be
        gate, up = acc.to(DTYPE).to(gl.float32).reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
        acc = gate / (1.0 + gl.exp(-gate)) * up
    result = gl.convert_layout(acc.to(DTYPE), layout)
    tile = item // columns
    row = gl.load(tiles_ptr + max_tiles + tile) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = item % columns * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    real = (row < gl.load(tiles_ptr + 2 * max_tiles + tile))[:, None] & (column < num_columns)[None, :]
    gl.store(out_ptr + row.to(gl.int64)[:, None] * num_columns + column[None, :], result, mask=real)


@gluon.jit
def _produce(
    rows, weights, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready,
    free, GATED: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill one stage after the other, each as soon as it is free; the first ones with weights before rows are there."""
    BLOCKS: gl.constexpr = 2 if GATED else 1
    NUM_BYTES: gl.constexpr = rows.block_type.nbytes + weights.block_type.nbytes * BLOCKS
    first = gl.program_id(0)
    if first < num_items:
        block_row = gl.load(tiles_ptr + first // columns) * num_columns * BLOCKS + first % columns * COLUMNS
        for i in gl.static_range(STAGES):
            needed = i * INNER < width
            hopper.mbarrier.expect(ready.index(i), NUM_BYTES, pred=needed)
            _fetch_weights(
                weights, block_row, i * INNER, weight_buffers.index(i), ready.index(i), num_columns, needed, GATED
            )  # fmt: skip
    wait_for_inputs(PDL)
    stage = 0
    phase = 1  # what was never used is free
    for item in range(first, num_items, gl.num_programs(0)):
        tile = item // columns
        row = gl.load(tiles_ptr + max_tiles + tile)
        block_row = gl.load(tiles_ptr + tile) * num_columns * BLOCKS + item % columns * COLUMNS
        for start in range(0, width, INNER):
            if (item != first) | (start >= STAGES * INNER):
                hopper.mbarrier.wait(free.index(stage), phase)
                hopper.mbarrier.expect(ready.index(stage), NUM_BYTES)
                _fetch_weights(
                    weights, block_row, start, weight_buffers.index(stage), ready.index(stage), num_columns, True, GATED
                )  # fmt: skip
            load_block(rows, [row, start], ready.index(stage), row_buffers.index(stage))
            stage, phase = next_stage_of(stage, phase, STAGES)


@gluon.jit
def _consume_tall(
    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready, free,
    STORE: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply one stage after the other, each as soon as it is ready: rows on the left."""
    BLOCK: gl.constexpr = COLUMNS * (2 if GATED else 1)
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK, 16])
    stage = 0
    phase = 0
    before = STAGES - 1  # the stage of the step before
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        acc = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout)
        for start in range(0, width, INNER):
            hopper.mbarrier.wait(ready.index(stage), phase)
            acc = hopper.warpgroup_mma(
                row_buffers.index(stage), weight_buffers.index(stage).permute([1, 0]), acc, is_async=True
            )  # fmt: skip
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()  # nobody multiplies the step before any more
            hopper.mbarrier.arrive(free.index(before), pred=start > 0)
            before = stage
            stage, phase = next_stage_of(stage, phase, STAGES)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        hopper.mbarrier.arrive(free.index(before))
        _store_tall(acc, out_ptr, tiles_ptr, max_tiles, item, columns, num_columns, STORE, GATED, ROWS, COLUMNS)


@gluon.jit
def _consume_low(
    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready, free,
    GATED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_consume_tall`, with weights on the left; gate and up are products of their own."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = 0
    phase = 0
    before = STAGES - 1  # the stage of the step before
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        acc = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
        acc_up = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
        for start in range(0, width, INNER):
            hopper.mbarrier.wait(ready.index(stage), phase)
            weight = weight_buffers.index(stage)
            x = row_buffers.index(stage).permute([1, 0])
            if GATED:
                acc = hopper.warpgroup_mma(weight.slice(0, COLUMNS), x, acc, is_async=True)
                acc_up = hopper.warpgroup_mma(weight.slice(COLUMNS, COLUMNS), x, acc_up, is_async=True)
                acc, acc_up = hopper.warpgroup_mma_wait(2, deps=[acc, acc_up])
            else:
                acc = hopper.warpgroup_mma(weight, x, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()  # nobody multiplies the step before any more
            hopper.mbarrier.arrive(free.index(before), pred=start > 0)
            before = stage
            stage, phase = next_stage_of(stage, phase, STAGES)
        if GATED:
            acc, acc_up = hopper.warpgroup_mma_wait(0, deps=[acc, acc_up])
        else:
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        hopper.mbarrier.arrive(free.index(before))
        if GATED:  # rounded as two separate products would be
            acc = acc.to(DTYPE).to(gl.float32)
            acc = acc / (1.0 + gl.exp(-acc)) * acc_up.to(DTYPE).to(gl.float32)
        tile = item // columns
        row = gl.load(tiles_ptr + max_tiles + tile) + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        column = item % columns * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
        real = (row < gl.load(tiles_ptr + 2 * max_tiles + tile))[None, :] & (column < num_columns)[:, None]
        gl.store(out_ptr + row.to(gl.int64)[None, :] * num_columns + column[:, None], acc.to(DTYPE), mask=real)


@gluon.jit
def _consume(
    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready, free,
    STORE: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply one stage after the other, in the form for the tiles' height."""
    if STORE is None:
        _consume_low(
            out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready,
            free, GATED, ROWS, COLUMNS, INNER, STAGES,
        )  # fmt: skip
    else:
        _consume_tall(
            out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready,
            free, STORE, GATED, ROWS, COLUMNS, INNER, STAGES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["max_tiles"])
def product_hopper_kernel(
    rows,
    weights,
    out_ptr,
    tiles_ptr,
    num_tiles_ptr,
    max_tiles,
    num_columns,
    width,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    STORE: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[row] = weight[expert] @ rows[row]; gated: silu of the first half's rows times the second's.

    rows, weights: descriptors, in blocks [ROWS, INNER] and [COLUMNS, INNER]. A block may reach beyond its expert's rows
    or columns: what is there is multiplied and not stored. Tiles are read before inputs are waited for.
    STORE: the layout from `store_layout` for tiles of TALL rows, with 8 warps; None for lower ones, with 4.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    row_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, INNER], shared_layout)
    weight_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS * (2 if GATED else 1), INNER], shared_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=1)
    hopper.fence_async_shared()

    columns = (num_columns + COLUMNS - 1) // COLUMNS
    num_items = gl.load(num_tiles_ptr) * columns
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers,
                    weight_buffers, ready, free, STORE, GATED, ROWS, COLUMNS, INNER, STAGES,
                ),
            ),
            (
                _produce,
                (
                    rows, weights, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers,
                    weight_buffers, ready, free, GATED, COLUMNS, INNER, STAGES, PDL,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
