"""A dense product of few rows on Hopper: weights are on their way before the rows are known.

A program takes 64 rows of the weight, which stand on the left, and runs along the inner dimension; blocks of weights
and rows come in a ring of stages. The first weights are asked for before the kernel before has ended.
"""

# mypy: ignore-errors

from specgen.kernels._triton import gl, gluon, hopper, load_block, next_stage_of, thread_barrier, wait_for_inputs


@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_hopper_kernel(
    weights,
    x,
    out_ptr,
    num_rows,
    num_columns,
    inner,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[row, column] = weight[column] @ x[row]. weights, x: descriptors in blocks [64, STEP] and [ROWS, STEP].

    A block may reach beyond its tensor: what is there is 0. 4 warps.
    """
    COLUMNS: gl.constexpr = weights.block_type.shape[0]
    STEP: gl.constexpr = weights.block_type.shape[1]
    ROWS: gl.constexpr = x.block_type.shape[0]
    DTYPE: gl.constexpr = weights.dtype
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    first_column = gl.program_id(0) * COLUMNS
    weight_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, STEP], shared_layout)
    x_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, STEP], shared_layout)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    num_steps = (inner + STEP - 1) // STEP
    for i in gl.static_range(STAGES):
        needed = i < num_steps
        hopper.mbarrier.expect(ready.index(i), weights.block_type.nbytes, pred=needed)
        load_block(weights, [first_column, i * STEP], ready.index(i), weight_buffers.index(i), pred=needed)
    wait_for_inputs(PDL)
    for i in gl.static_range(STAGES):
        needed = i < num_steps
        hopper.mbarrier.expect(ready.index(STAGES + i), x.block_type.nbytes, pred=needed)
        load_block(x, [0, i * STEP], ready.index(STAGES + i), x_buffers.index(i), pred=needed)
    thread_barrier()
    acc = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
    stage = 0
    phase = 0
    for step in range(0, num_steps):
        hopper.mbarrier.wait(ready.index(stage), phase)
        hopper.mbarrier.wait(ready.index(STAGES + stage), phase)
        weight = weight_buffers.index(stage)
        rows = x_buffers.index(stage)
        acc = hopper.warpgroup_mma(weight, rows.permute([1, 0]), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()  # nobody multiplies this stage any more
        ahead = step + STAGES
        needed = ahead < num_steps
        hopper.mbarrier.expect(ready.index(stage), weights.block_type.nbytes, pred=needed)
        load_block(weights, [first_column, ahead * STEP], ready.index(stage), weight, pred=needed)
        hopper.mbarrier.expect(ready.index(STAGES + stage), x.block_type.nbytes, pred=needed)
        load_block(x, [0, ahead * STEP], ready.index(STAGES + stage), rows, pred=needed)
        stage, phase = next_stage_of(stage, phase, STAGES)
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    target = out_ptr + row[None, :] * num_columns + column[:, None]
    gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[None, :] & (column < num_columns)[:, None])
