"""RMS norm by row, with an optional residual sum, or a weighted sum and a residual, in front.

Rounding follows transformers' DeepseekV3RMSNorm: normalise in float32, round to the input's dtype, then times the
weight. Measured on the CPU (AVX-512, 1 and 2 threads): mean and float32 rsqrt give the same row bits for every number
of rows; bfloat16 rsqrt doesn't, so the statistics stay in float32.
"""

from typing import overload

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import pdl, start_next_and_wait, tl, triton


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x) * weight, or with a residual (norm(x + residual) * weight, residual), which is the sum then.

    x, residual: [T, H], rows may be strided; weight: [H], same dtype. The norm is contiguous, in x's dtype.
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
    total = x if residual is None else residual.add_(x)
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
    if num_rows:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(num_rows,)](
            x,
            x.stride(0),
            x if residual is None else residual,
            0 if residual is None else residual.stride(0),
            weight,
            out,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
            **pdl(),
        )
    return out if residual is None else (out, residual)


@triton.jit
def normalised(x, weight, width, eps):
    """Return the norm of a row, whose elements beyond `width` are 0, times a float32 weight, in the row's dtype."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    out_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        total = residual_ptr + row * residual_stride + columns
        x = (x.to(tl.float32) + tl.load(total, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total, x, mask=mask)
    tl.store(out_ptr + row * width + columns, normalised(x, weight, width, eps), mask=mask)


def combine_norm(
    rows: torch.Tensor,
    places: torch.Tensor | None,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(residual) * norm_weight, residual), to which the sum over j of weights[:, j] * part j was added.

    rows: [n, H], contiguous; places: [T, k] int32, the row of a token's part j, None for row t * k + j; weights: [T, k]
    float32; residual: [T, H], rows may be strided; norm_weight: [H]. The sum runs in float32 in the order of j and is
    rounded before it is added. The norm is contiguous, [T, H] in rows' dtype. Raises: ValueError on a wrong dtype or
    shape.
    """
    num_tokens, top_k = weights.shape
    check("rows", rows, rows.dtype, None if places is not None else num_tokens * top_k, None)
    check("weights", weights, torch.float32, None, None)
    check("residual", residual, rows.dtype, num_tokens, rows.shape[1])
    check("norm_weight", norm_weight, rows.dtype, rows.shape[1])
    check_same_device(rows=rows, weights=weights, residual=residual, norm_weight=norm_weight)
    if places is not None:
        check("places", places, torch.int32, num_tokens, top_k)
        check_same_device(rows=rows, places=places)
    if not rows.is_contiguous() or not weights.is_contiguous() or not (places is None or places.is_contiguous()):
        raise ValueError("rows, places and weights: expected contiguous tensors")
    run = combine_norm_triton if rows.is_cuda else combine_norm_torch
    return run(rows, places, weights, residual, norm_weight, eps)


def combine_norm_torch(
    rows: torch.Tensor,
    places: torch.Tensor | None,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `combine_norm` returns, in plain torch."""
    num_tokens, top_k = weights.shape
    parts = (rows if places is None else rows.index_select(0, places.flatten())).view(num_tokens, top_k, -1)
    total = parts[:, 0] * weights[:, 0, None]
    for j in range(1, top_k):
        total += parts[:, j] * weights[:, j, None]
    out = rms_norm_torch(total.to(rows.dtype), norm_weight, eps, residual)
    assert isinstance(out, tuple)
    return out


def combine_norm_triton(
    rows: torch.Tensor,
    places: torch.Tensor | None,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `combine_norm` returns, by one program a token.

    All but `rows` is read before the kernel waits for its inputs: see `wait_for_inputs`.
    """
    (num_tokens, top_k), width = weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, width, dtype=rows.dtype, device=rows.device)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _combine_norm_kernel[(num_tokens,)](
            rows, weights if places is None else places, weights, residual, residual.stride(0), norm_weight, out, width,
            eps, HAS_PLACES=places is not None, TOP_K=top_k, BLOCK=block, num_warps=max(1, min(16, block // 128)),
            **pdl(),
        )  # fmt: skip
    return out, residual


@triton.jit
def _combine_norm_kernel(
    rows_ptr,
    places_ptr,
    weights_ptr,
    residual_ptr,
    residual_stride,
    norm_weight_ptr,
    out_ptr,
    width,
    eps,
    HAS_PLACES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    token = tl.program_id(0).to(tl.int64)
    target = residual_ptr + token * residual_stride + columns
    residual = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + columns, mask=mask, other=0.0)
    weights, places = (), ()
    for j in tl.static_range(TOP_K):
        place = token * TOP_K + j
        weights += (tl.load(weights_ptr + place),)  # type: ignore[assignment]
        places += (tl.load(places_ptr + place).to(tl.int64) if HAS_PLACES else place,)  # type: ignore[assignment]
    start_next_and_wait(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    parts = ()  # with few elements a thread, the compiler asks for nearly all before it needs the first
    for j in tl.static_range(TOP_K):
        part = tl.load(rows_ptr + places[j] * width + columns, mask=mask, other=0.0)
        parts += (part,)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        acc += weights[j] * parts[j].to(tl.float32)
    total = (acc.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(target, total, mask=mask)
    normed = normalised(total, norm_weight.to(tl.float32), width, eps)
    tl.store(out_ptr + token * width + columns, normed, mask=mask)
