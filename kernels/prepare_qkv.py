"""A layer's product of queries, keys and values, made ready for attention: bias, norm by head, rotation, cache write.

It knows heads and slots, not requests. Everything runs in float32 within a head, rounded where transformers rounds
(after the bias, after the norm, after the norm's weight, after the rotation), so a row's bits are its own.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._kv_cache import check_kv_cache, store_kv, write_rows
from specgen.kernels._triton import pdl, tl, triton, wait_for_inputs
from specgen.kernels.rms_norm import rms_norm_torch
from specgen.kernels.rope import rotate

_HEADS = 8  # heads a program


def prepare_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return the queries [T, Hq, D], rotated; slot `slot_mapping[t]` of the cache holds token t's keys and values.

    qkv: [T, (Hq + 2 Hkv) D], queries first, then keys, then values, contiguous; positions: [T] int64, clamped into the
    table; cos_sin: [max_pos, P] float32, cosines in [:P/2], sines in [P/2:]: the first P of a head's D elements turn,
    in pairs (2i, 2i+1) if interleaved, else (i, i + P/2); slot_mapping: [T] int64, -1 writes nothing anywhere;
    kv_cache: [num_blocks, block_size, 2 Hkv D], keys first, contiguous, same dtype or FP8; bias: like a row of qkv,
    added first; q_norm and k_norm: [D], weights of an RMS norm of each query and key head before the rotation, both or
    none.
    Raises: ValueError on a wrong dtype or shape.
    Source: Su et al., arXiv 2104.09864, eq. 34 (rotation); Zhang and Sennrich, arXiv 1910.07467, eq. 4 (norm).
    """
    width = qkv.shape[-1]
    head_dim = width // (num_heads + 2 * num_kv_heads)
    check("qkv", qkv, qkv.dtype, None, head_dim * (num_heads + 2 * num_kv_heads))
    check("positions", positions, torch.int64, qkv.shape[0])
    check("cos_sin", cos_sin, torch.float32, None, None)
    check("slot_mapping", slot_mapping, torch.int64, qkv.shape[0])
    check_kv_cache(kv_cache, qkv.dtype, 2 * num_kv_heads * head_dim)
    check_same_device(qkv=qkv, positions=positions, cos_sin=cos_sin, slot_mapping=slot_mapping, kv_cache=kv_cache)
    if not qkv.is_contiguous():
        raise ValueError("qkv: expected a contiguous tensor")
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim or cos_sin.shape[0] == 0:
        raise ValueError(f"cos_sin: expected an even width up to {head_dim}, got {list(cos_sin.shape)}")
    if bias is not None:
        check("bias", bias, qkv.dtype, width)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or none")
    if q_norm is not None and k_norm is not None:
        check("q_norm", q_norm, qkv.dtype, head_dim)
        check("k_norm", k_norm, qkv.dtype, head_dim)
    run = prepare_qkv_triton if qkv.is_cuda else prepare_qkv_torch
    return run(
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        kv_cache,
        num_heads,
        num_kv_heads,
        bias,
        q_norm,
        k_norm,
        eps,
        interleaved,
    )


def prepare_qkv_torch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return what `prepare_qkv` returns, in plain torch."""
    num_tokens = qkv.shape[0]
    if bias is not None:
        qkv = qkv + bias
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    num_turned = num_heads + num_kv_heads
    heads = qkv.view(num_tokens, num_turned + num_kv_heads, head_dim)
    turned = heads[:, :num_turned]
    if q_norm is not None and k_norm is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads:num_turned]
        turned = torch.cat([_norm_heads(q, q_norm, eps), _norm_heads(k, k_norm, eps)], 1)
    table = cos_sin.index_select(0, positions.clamp(0, cos_sin.shape[0] - 1))
    cos, sin = table[:, None].chunk(2, dim=-1)
    turned = rotate(turned, cos, sin, interleaved)
    rows = torch.cat([turned[:, num_heads:], heads[:, num_turned:]], 1)
    write_rows(kv_cache, slot_mapping, rows.view(num_tokens, kv_cache.shape[-1]))
    return turned[:, :num_heads].contiguous()


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = rms_norm_torch(x.reshape(-1, x.shape[2]), weight, eps)
    assert isinstance(out, torch.Tensor)
    return out.view(x.shape)


def prepare_qkv_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return what `prepare_qkv` returns, by one program a token and group of heads."""
    num_tokens = qkv.shape[0]
    all_heads = num_heads + 2 * num_kv_heads
    head_dim, half = qkv.shape[1] // all_heads, cos_sin.shape[1] // 2
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        rest = head_dim - 2 * half
        _prepare_qkv_kernel[(num_tokens, triton.cdiv(all_heads, _HEADS))](
            qkv,
            qkv if bias is None else bias,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            positions,
            cos_sin,
            cos_sin.stride(0),
            cos_sin.shape[0],
            slot_mapping,
            kv_cache,
            q,
            num_heads,
            num_kv_heads,
            head_dim,
            half,
            HAS_BIAS=bias is not None,
            HAS_NORM=q_norm is not None,
            INTERLEAVED=interleaved,
            HEADS=_HEADS,
            HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(rest) if rest else 0,
            num_warps=4,
            **pdl(),
        )
    return q


@triton.jit
def _load_part(row_ptr, bias_ptr, columns, mask, HAS_BIAS: tl.constexpr):
    """Return a part of the heads' elements in float32, the bias added and rounded."""
    x = tl.load(row_ptr + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        x = (x.to(tl.float32) + tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _norm_part(x, scale, q_norm_ptr, k_norm_ptr, column, is_q, is_v, mask, dtype: tl.constexpr):
    """Return a part of the heads, query and key heads normed by their weights, value heads as they were."""
    weight = tl.where(
        is_q, tl.load(q_norm_ptr + column, mask=mask, other=0.0), tl.load(k_norm_ptr + column, mask=mask, other=0.0)
    )
    normed = (x * scale[:, None]).to(dtype).to(tl.float32) * weight.to(tl.float32)
    return tl.where(is_v, x, normed.to(dtype).to(tl.float32))


@triton.jit
def _prepare_qkv_kernel(
    qkv_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    positions_ptr,
    table_ptr,
    table_stride,
    max_positions,
    slot_mapping_ptr,
    cache_ptr,
    q_ptr,
    num_heads,
    num_kv_heads,
    head_dim,
    half,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    all_heads = num_heads + 2 * num_kv_heads
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    is_real = head < all_heads
    is_q = head < num_heads
    is_v = head >= num_heads + num_kv_heads
    row_ptr = qkv_ptr + token * all_heads * head_dim

    pair = tl.arange(0, HALF)[None, :]
    in_pair = pair < half
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    mask = is_real & in_pair
    x1 = _load_part(row_ptr, bias_ptr, head * head_dim + first, mask, HAS_BIAS)
    x2 = _load_part(row_ptr, bias_ptr, head * head_dim + second, mask, HAS_BIAS)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        rest_mask = is_real & (rest < head_dim)
        x3 = _load_part(row_ptr, bias_ptr, head * head_dim + rest, rest_mask, HAS_BIAS)
    if HAS_NORM:
        total = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if REST > 0:
            total += tl.sum(x3 * x3, axis=1)
        scale = tl.rsqrt(total / head_dim + eps)
        x1 = _norm_part(x1, scale, q_norm_ptr, k_norm_ptr, first, is_q, is_v, in_pair, dtype)
        x2 = _norm_part(x2, scale, q_norm_ptr, k_norm_ptr, second, is_q, is_v, in_pair, dtype)
        if REST > 0:
            x3 = _norm_part(x3, scale, q_norm_ptr, k_norm_ptr, rest, is_q, is_v, rest < head_dim, dtype)

    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1)
    cos = tl.load(table_ptr + position * table_stride + pair, mask=in_pair, other=0.0)
    sin = tl.load(table_ptr + position * table_stride + half + pair, mask=in_pair, other=0.0)
    y1 = tl.where(is_v, x1, x1 * cos - x2 * sin).to(dtype)
    y2 = tl.where(is_v, x2, x2 * cos + x1 * sin).to(dtype)

    q_row = q_ptr + (token * num_heads + head) * head_dim
    tl.store(q_row + first, y1, mask=mask & is_q)
    tl.store(q_row + second, y2, mask=mask & is_q)
    if REST > 0:
        tl.store(q_row + rest, x3.to(dtype), mask=rest_mask & is_q)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        is_kv = head >= num_heads
        cache_row = cache_ptr + slot * (2 * num_kv_heads * head_dim) + (head - num_heads) * head_dim
        store_kv(cache_row + first, y1, mask & is_kv)
        store_kv(cache_row + second, y2, mask & is_kv)
        if REST > 0:
            store_kv(cache_row + rest, x3.to(dtype), rest_mask & is_kv)
