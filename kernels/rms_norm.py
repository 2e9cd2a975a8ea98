"""RMS norm by row, with an optional residual sum in front. It knows rows of numbers only.

Rounding follows transformers' DeepseekV3RMSNorm: normalise in float32, round to the input's dtype, then times the
weight. Measured on the CPU (AVX-512, 1 and 2 threads): mean and float32 rsqrt give the same row bits for every number
of rows; bfloat16 rsqrt doesn't, so the statistics stay in float32.
"""

from typing import overload

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x) * weight, or with a residual (norm(x + residual) * weight, x + residual).

    x, residual: [T, H], rows may be strided; weight: [H], same dtype. Returns contiguous [T, H] in x's dtype.
    Raises: ValueError on a wrong dtype or shape.
    Source: Zhang and Sennrich, arXiv 1910.07467, eq. 4.
    """
    check("x", x, x.dtype, None, None)
    check("weight", weight, x.dtype, x.shape[1])
    check_same_device(x=x, weight=weight)
    if residual is not None:
        check("residual", residual, x.dtype, *x.shape)
        check_same_device(x=x, residual=residual)
    return (rms_norm_triton if x.is_cuda else rms_norm_torch)(x, weight, eps, residual)


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what `rms_norm` returns, in plain torch."""
    total = x if residual is None else x + residual
    wide = total.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    out = (wide * scale).to(x.dtype).mul_(weight)
    return out if residual is None else (out, total)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what `rms_norm` returns, by one program a row."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if num_rows:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(num_rows,)](
            x,
            x.stride(0),
            x if residual is None else residual,
            0 if residual is None else residual.stride(0),
            weight,
            out,
            total,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    return out if residual is None else (out, total)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    out_ptr,
    total_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * width + columns, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (normed * weight).to(x.dtype), mask=mask)
