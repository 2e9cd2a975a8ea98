"""Products with weights held in FP8 (e4m3), one scale a row of the weight: half the bytes of bfloat16.

For products that are bound by the reading of weights (few rows, large weights) and may round as they like, as those of
draft layers may. On CUDA both sides meet in float16: an instruction turns two e4m3 values into it, where bfloat16 takes
four. Activations beyond float16's range are cut to it.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import pdl, tl, triton, wait_for_inputs
from specgen.kernels.linear import linear_torch

FLOAT8 = torch.float8_e4m3fn
MAX_ROWS = 64  # of one tile; with more, arithmetic counts, and a product of bfloat16 weights is the faster one

_LARGEST = torch.finfo(FLOAT8).max
_CHUNK_ELEMENTS = 1 << 24  # rounded at a time, in float32
# Tiles by rows of x: columns, inner, warps, stages; slim ones where wide ones would leave processors without work.
_WIDE = {16: (64, 128, 4, 4), 32: (128, 128, 8, 4), 64: (128, 128, 8, 3)}
_SLIM = {16: (16, 256, 4, 4), 32: (16, 256, 4, 4), 64: (32, 128, 4, 4)}
_MANY_PROGRAMS = 256
_NARROW_BLOCK = 1024


class Float8Weight(NamedTuple):
    """`values [..., N, K] float8_e4m3fn` times `scale [..., N] float32`, one a row."""

    values: torch.Tensor
    scale: torch.Tensor


def quantize_rows(weight: torch.Tensor) -> Float8Weight:
    """Return `weight [..., N, K]` rounded to FP8, each row scaled so that its largest element is FP8's largest."""
    rows = weight.reshape(-1, weight.shape[-1])
    values = torch.empty(rows.shape, dtype=FLOAT8, device=weight.device)
    scale = torch.empty(rows.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step].float()
        largest = part.abs().amax(dim=1)
        scale[first : first + step] = torch.where(largest > 0, largest / _LARGEST, 1.0)
        values[first : first + step] = (part / scale[first : first + step, None]).to(FLOAT8)
    return Float8Weight(values.view(weight.shape), scale.view(weight.shape[:-1]))


def dequantize_rows(weight: Float8Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight's values in `dtype`."""
    return (weight.values.float() * weight.scale.unsqueeze(-1)).to(dtype)


def float8_linear(x: torch.Tensor, weight: Float8Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return x @ weight.T in `out_dtype`, x's own if it is None; a row's bits don't depend on the other rows.

    x: [T, K], contiguous; weight: [N, K]. Returns [T, N]. Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_columns, inner = weight.values.shape
    check("x", x, x.dtype, None, inner)
    check("values", weight.values, FLOAT8, num_columns, inner)
    check("scale", weight.scale, torch.float32, num_columns)
    check_same_device(x=x, values=weight.values, scale=weight.scale)
    for name, tensor in (("x", x), ("values", weight.values), ("scale", weight.scale)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    op = float8_linear_triton if x.is_cuda else float8_linear_torch
    return op(x, weight, out_dtype or x.dtype)


def float8_linear_torch(x: torch.Tensor, weight: Float8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Return what `float8_linear` returns, by a product with the values in x's dtype."""
    return linear_torch(x, dequantize_rows(weight, x.dtype)).to(out_dtype)


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Return x, contiguous, as the kernels want it beside FP8 weights: bfloat16 as float16, cut to its range."""
    if x.dtype != torch.bfloat16:
        return x
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _NARROW_BLOCK),)
        _narrow_kernel[grid](x, out, x.numel(), BLOCK=_NARROW_BLOCK, **pdl())
    return out


@triton.jit(do_not_specialize=["num_elements"])
def _narrow_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num_elements, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, tl.clamp(x, -65504.0, 65504.0).to(tl.float16), mask=at < num_elements)


def float8_linear_triton(x: torch.Tensor, weight: Float8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """Return what `float8_linear` returns, by fixed tiles and one order of the inner sum."""
    (num_rows, inner), num_columns = x.shape, weight.values.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    rows = next((height for height in _WIDE if height >= num_rows), max(_WIDE))
    wide = triton.cdiv(num_columns, _WIDE[rows][0]) >= _MANY_PROGRAMS
    columns, step, warps, stages = (_WIDE if wide else _SLIM)[rows]
    # Tiles of the same columns are neighbours: the later ones find the weight in the cache.
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
    _float8_linear_kernel[grid](
        narrow(x), weight.values, weight.scale, out, num_rows, num_columns, inner, ROWS=rows, COLUMNS=columns,
        INNER=step, num_warps=warps, num_stages=stages, **pdl(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _float8_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, num_columns, inner: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    x_rows = x_ptr + rows[:, None].to(tl.int64) * inner
    weight_rows = weight_ptr + columns[None, :].to(tl.int64) * inner
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        x = tl.load(x_rows + k[None, :], mask=in_rows[:, None] & (k[None, :] < inner), other=0.0)
        weight = tl.load(weight_rows + k[:, None], mask=in_columns[None, :] & (k[:, None] < inner), other=0.0)
        acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
    acc *= tl.load(scale_ptr + columns, mask=in_columns, other=0.0)[None, :]
    target = out_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
