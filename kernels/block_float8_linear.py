"""Products with weights held in FP8 (e4m3) as checkpoints store them: one scale for each row and 128 columns.

A weight is turned into the activations' dtype without loss and multiplied; the sum over 128 columns is scaled in
float32. So the activations are not rounded, and only the order of the sums differs from a product with the dequantised
weight. A row's bits don't depend on the other rows: every tile sums the same 128 columns from nothing, block by block,
and the same segments of blocks.
Weights stand on the left, where registers can hold what they are widened to, and so that tiles of any height are made
of the same instructions.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import pdl, tile_height, tl, triton, wait_for_inputs
from specgen.kernels.linear import linear_torch

FLOAT8 = torch.float8_e4m3fn
BLOCK = 128  # columns that share a scale

# Two e4m3 values as bfloat16: their bits shifted to where its exponent and mantissa end, times 2 ** 120 for the other
# bias. Instructions that convert are four times slower than these. NaN would become 480; loaded weights have none.
_WIDEN = tl.constexpr("""{
.reg .b32 pair, low, zero;
prmt.b32 pair, $1, 0, 0x1404;
shr.u32 low, pair, 4;
and.b32 low, low, 0x07f007f0;
lop3.b32 pair, pair, 0x80008000, low, 0xEA;
mov.b32 low, 0x7b807b80;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, pair, low, zero;
}""")

_SEGMENT = 16  # blocks that are summed from nothing
_MANY_PROGRAMS = 528  # so many tiles fill the device (four times 132 processors) without a program a segment
_ADDED = 1024  # elements that one program adds up
# Tiles by height: columns, warps, stages. A row's bits are the same in each.
_TILES = {16: (64, 4, 5), 64: (64, 4, 4), 128: (128, 8, 3)}


def block_float8_linear(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T for the weight whose element [n, k] is values[n, k] * scale[k // 128, n].

    x: [T, K]; values: [N, K] float8_e4m3fn; scale: [ceil(K / 128), N] float32, both contiguous. Returns [T, N] in x's
    dtype. Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_columns, inner = values.shape
    check("x", x, x.dtype, None, inner)
    check("values", values, FLOAT8, None, None)
    check("scale", scale, torch.float32, -(-inner // BLOCK), num_columns)
    check_same_device(x=x, values=values, scale=scale)
    if not values.is_contiguous() or not scale.is_contiguous():
        raise ValueError("values and scale: expected contiguous tensors")
    return (block_float8_linear_triton if x.is_cuda else block_float8_linear_torch)(x, values, scale)


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, K] in `dtype`, rounded once."""
    full = scale.T.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return (values.float() * full).to(dtype)


def block_float8_linear_torch(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what `block_float8_linear` returns, by a product with the dequantised weight."""
    return linear_torch(x, dequantize_blocks(values, scale, x.dtype))


def by_bits(x: torch.Tensor) -> bool:
    """Whether `widen` is to shift bits: on a GPU and to bfloat16; the interpreter knows no such instructions."""
    return x.is_cuda and x.dtype == torch.bfloat16


@triton.jit
def widen(values, DTYPE: tl.constexpr, BY_BITS: tl.constexpr):
    """Return FP8 values, none of them NaN, in DTYPE: exactly the same numbers."""
    if BY_BITS:
        return tl.inline_asm_elementwise(
            _WIDEN, "=r,r", [values.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return values.to(DTYPE)


def block_float8_linear_triton(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what `block_float8_linear` returns, by tiles that sum in one order.

    Sums over _SEGMENT blocks start from nothing and are added up in order: by the tile's program or, where there are
    few tiles, each by a program of its own and a second kernel.
    """
    (num_rows, inner), num_columns = x.shape, values.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    height = tile_height(_TILES, num_rows)
    columns, warps, stages = _TILES[height]
    # Tiles of the same columns are neighbours: the later ones find the weight in the cache.
    grid = (triton.cdiv(num_rows, height), triton.cdiv(num_columns, columns))
    segments = triton.cdiv(inner, BLOCK * _SEGMENT)
    by_segment = segments > 1 and grid[0] * grid[1] < _MANY_PROGRAMS
    sums = torch.empty(segments, num_rows, num_columns, dtype=torch.float32, device=x.device) if by_segment else out
    _block_float8_linear_kernel[(*grid, segments if by_segment else 1)](
        x, x.stride(0), values, scale, sums, num_rows, num_columns, inner, ROWS=height, COLUMNS=columns, BLOCK=BLOCK,
        SEGMENT=_SEGMENT, BY_SEGMENT=by_segment, BY_BITS=by_bits(x), num_warps=warps, num_stages=stages,
        enable_fp_fusion=False, **pdl(),
    )  # fmt: skip
    if by_segment:
        _add_segments_kernel[(triton.cdiv(out.numel(), _ADDED),)](
            sums, out, out.numel(), segments, BLOCK=_ADDED, **pdl()
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _block_float8_linear_kernel(
    x_ptr,
    x_stride,
    values_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    inner: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BY_SEGMENT: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, column] = weight[column] @ x[row]; BY_SEGMENT: out[s, row, column], the sum over segment s alone."""
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    x_rows = x_ptr + rows[:, None].to(tl.int64) * x_stride
    weight_rows = values_ptr + columns[:, None].to(tl.int64) * inner
    num_blocks: tl.constexpr = (inner + BLOCK - 1) // BLOCK
    SEGMENTS: tl.constexpr = 1 if BY_SEGMENT else (num_blocks + SEGMENT - 1) // SEGMENT
    # A step's scales are loaded in the step before: nothing waits for them.
    next_scale = tl.load(scale_ptr + tl.program_id(2) * SEGMENT * num_columns + columns, mask=in_columns, other=0.0)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for segment in range(0, SEGMENTS):
        first = (tl.program_id(2) + segment) * SEGMENT
        acc = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for block in range(first, tl.minimum(first + SEGMENT, num_blocks)):
            k = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_rows + k[None, :], mask=in_rows[:, None] & (k[None, :] < inner), other=0.0)
            weight = tl.load(weight_rows + k[None, :], mask=in_columns[:, None] & (k[None, :] < inner), other=0.0)
            scale = next_scale
            following = tl.minimum(block + 1, num_blocks - 1)
            next_scale = tl.load(scale_ptr + following * num_columns + columns, mask=in_columns, other=0.0)
            product = tl.dot(widen(weight, x.dtype, BY_BITS), tl.trans(x), input_precision="ieee")
            acc = tl.fma(product, tl.broadcast_to(scale[:, None], COLUMNS, ROWS), acc)
        total += acc
    out_row = tl.program_id(2).to(tl.int64) * num_rows + rows
    target = out_ptr + out_row[None, :] * num_columns + columns[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=in_rows[None, :] & in_columns[:, None])


@triton.jit(do_not_specialize=["num_elements", "segments"])
def _add_segments_kernel(sums_ptr, out_ptr, num_elements, segments, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = sums[0, i] + sums[1, i] + ..."""
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for segment in range(0, segments):
        total += tl.load(sums_ptr + segment * num_elements.to(tl.int64) + at, mask=at < num_elements, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < num_elements)
