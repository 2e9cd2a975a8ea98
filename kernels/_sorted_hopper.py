"""Products of sorted rows on Hopper: `_sorted_experts` in Gluon.

A program takes one item after the other: a tile (rows of one expert) and some columns of its weight, the columns of a
tile next to each other, so that programs that run at once share weights and rows. Warps of their own fetch blocks into
a ring of stages, two groups multiply what is there, each half of the tile's rows, and wait for nobody but the ring:
while one stores its half of a result, the other multiplies. The ring does not stop at the end of an item either. A
block of weights in shared memory has COLUMNS rows; gated, COLUMNS of gate and then as many of up.
"""

# mypy: ignore-errors

from typing import Any

from specgen.kernels._triton import gl, gluon, hopper, load_block, thread_barrier


def store_layout(rows: int, columns: int) -> Any:
    """Return the layout in which 4 warps store half a tile: each the 16 rows it multiplied, a thread 16 bytes at once.

    So results change hands within a warp only.
    """
    assert rows == 64
    bits = [1 << i for i in range(columns.bit_length() - 1)]
    registers = [[0, bit] for bit in bits[:3] + bits[5:]] + [[8, 0]]
    lanes = [[0, bit] for bit in bits[3:5]] + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _fetch(rows, weights, row, block_row, start, row_buffer, weight_buffer, barrier, num_columns, GATED: gl.constexpr):
    """Start copying a step's blocks into a stage; `barrier` is told."""
    COLUMNS: gl.constexpr = weights.block_type.shape[0]
    hopper.mbarrier.expect(barrier, rows.block_type.nbytes + weights.block_type.nbytes * (2 if GATED else 1))
    load_block(rows, [row, start], barrier, row_buffer)
    if GATED:
        gate, up = weight_buffer.slice(0, COLUMNS), weight_buffer.slice(COLUMNS, COLUMNS)
        load_block(weights, [block_row, start], barrier, gate)
        load_block(weights, [block_row + num_columns, start], barrier, up)
    else:
        load_block(weights, [block_row, start], barrier, weight_buffer)


@gluon.jit
def _store(
    acc, out_ptr, first_row, end, first_column, num_columns, layout: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Store half of an item's result; rows and columns beyond its end belong to others."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:  # rounded as two separate products would be
        gate, up = acc.to(DTYPE).to(gl.float32).reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
        acc = gate / (1.0 + gl.exp(-gate)) * up
    result = gl.convert_layout(acc.to(DTYPE), layout)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    real = (row < end)[:, None] & (column < num_columns)[None, :]
    gl.store(out_ptr + row.to(gl.int64)[:, None] * num_columns + column[None, :], result, mask=real)


@gluon.jit
def _produce(
    rows, weights, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready,
    free, GATED: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill one stage after the other, each as soon as it is free."""
    stage = 0
    phase = 1  # what was never used is free
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // columns
        row = gl.load(tiles_ptr + max_tiles + tile)
        block_row = gl.load(tiles_ptr + tile) * num_columns * (2 if GATED else 1) + item % columns * COLUMNS
        for start in range(0, width, INNER):
            hopper.mbarrier.wait(free.index(stage), phase)
            _fetch(
                rows, weights, row, block_row, start, row_buffers.index(stage), weight_buffers.index(stage),
                ready.index(stage), num_columns, GATED,
            )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _consume(
    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers, weight_buffers, ready, free,
    half: gl.constexpr, STORE: gl.constexpr, GATED: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply half of the rows of one stage after the other, each as soon as it is ready."""
    BLOCK: gl.constexpr = COLUMNS * (2 if GATED else 1)
    ROWS: gl.constexpr = row_buffers.shape[1] // 2
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    stage = 0
    phase = 0
    before = STAGES - 1  # the stage of the step before
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // columns
        first_row = gl.load(tiles_ptr + max_tiles + tile) + half * ROWS
        end = gl.load(tiles_ptr + 2 * max_tiles + tile)
        acc = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout)
        for start in range(0, width, INNER):
            hopper.mbarrier.wait(ready.index(stage), phase)
            own_rows = row_buffers.index(stage).slice(half * ROWS, ROWS, dim=0)
            acc = hopper.warpgroup_mma(own_rows, weight_buffers.index(stage).permute([1, 0]), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()  # nobody multiplies the step before any more
            hopper.mbarrier.arrive(free.index(before), pred=start > 0)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        hopper.mbarrier.arrive(free.index(before))
        _store(acc, out_ptr, first_row, end, item % columns * COLUMNS, num_columns, STORE, GATED, ROWS, COLUMNS)


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
):
    """out[row] = weight[expert] @ rows[row]; gated: silu of the first half's rows times the second's.

    rows, weights: descriptors, in blocks [ROWS, INNER] and [COLUMNS, INNER]. A block may reach beyond its expert's rows
    or columns: what is there is multiplied and not stored. STORE: the layout from `store_layout`. Launched with 4
    warps, which become the fetching ones; 8 more are started.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    row_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, INNER], shared_layout)
    weight_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS * (2 if GATED else 1), INNER], shared_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)  # a group each
    hopper.fence_async_shared()

    columns = (num_columns + COLUMNS - 1) // COLUMNS
    num_items = gl.load(num_tiles_ptr) * columns
    gl.warp_specialize(
        [
            (
                _produce,
                (
                    rows, weights, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers,
                    weight_buffers, ready, free, GATED, COLUMNS, INNER, STAGES,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers,
                    weight_buffers, ready, free, 0, STORE, GATED, COLUMNS, INNER, STAGES,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, tiles_ptr, max_tiles, num_items, columns, num_columns, width, row_buffers,
                    weight_buffers, ready, free, 1, STORE, GATED, COLUMNS, INNER, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
