"""Rotary embedding of queries and of one key head. The table of cosines and sines comes from `models.rope_table`.

Computed in float32 and rounded once; element by element, so a row's bits are its own.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated by their positions, as new contiguous tensors; the inputs stay as they are.

    q: [T, H, P], k: [T, P], rows and heads may be strided; positions: [T] int64, clamped into the table;
    cos_sin: [max_pos, P] float32, cosines in [:P/2], sines in [P/2:]. interleaved: pairs (2i, 2i+1), else (i, i + P/2);
    the output keeps the input's layout. Raises: ValueError on a wrong dtype or shape.
    Source: Su et al., arXiv 2104.09864, eq. 34.
    """
    check("q", q, q.dtype, None, None, None)
    check("k", k, q.dtype, q.shape[0], q.shape[2])
    check("positions", positions, torch.int64, q.shape[0])
    check("cos_sin", cos_sin, torch.float32, None, q.shape[2])
    check_same_device(q=q, k=k, positions=positions, cos_sin=cos_sin)
    if q.shape[2] % 2 or cos_sin.shape[0] == 0:
        raise ValueError(f"rope needs an even head size and a table, got {q.shape[2]} and {cos_sin.shape[0]} positions")
    return (apply_rope_triton if q.is_cuda else apply_rope_torch)(q, k, positions, cos_sin, interleaved)


def apply_rope_torch(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `apply_rope` returns, in plain torch."""
    table = cos_sin.index_select(0, positions.clamp(0, cos_sin.shape[0] - 1))
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos[:, None], sin[:, None], interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = x.shape[-1] // 2
    pairs = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    first, second = x[..., pairs[0]].float(), x[..., pairs[1]].float()
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = second * cos + first * sin
    return out


def apply_rope_triton(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `apply_rope` returns, by one program a token."""
    num_tokens, num_heads, width = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens:
        _rope_kernel[(num_tokens,)](
            q,
            q.stride(0),
            q.stride(1),
            k,
            k.stride(0),
            positions,
            cos_sin,
            cos_sin.stride(0),
            cos_sin.shape[0],
            q_out,
            k_out,
            num_heads,
            width // 2,
            INTERLEAVED=interleaved,
            HEADS=triton.next_power_of_2(num_heads),
            HALF=triton.next_power_of_2(width // 2),
        )
    return q_out, k_out


@triton.jit
def _rope_kernel(
    q_ptr,
    q_stride,
    q_head_stride,
    k_ptr,
    k_stride,
    positions_ptr,
    table_ptr,
    table_stride,
    max_positions,
    q_out_ptr,
    k_out_ptr,
    num_heads,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1)
    pair = tl.arange(0, HALF)
    in_pair = pair < half
    cos = tl.load(table_ptr + position * table_stride + pair, mask=in_pair, other=0.0)
    sin = tl.load(table_ptr + position * table_stride + half + pair, mask=in_pair, other=0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half

    k1 = tl.load(k_ptr + token * k_stride + first, mask=in_pair, other=0.0).to(tl.float32)
    k2 = tl.load(k_ptr + token * k_stride + second, mask=in_pair, other=0.0).to(tl.float32)
    k_out = k_out_ptr + token * (2 * half)
    tl.store(k_out + first, (k1 * cos - k2 * sin).to(k_out_ptr.dtype.element_ty), mask=in_pair)
    tl.store(k_out + second, (k2 * cos + k1 * sin).to(k_out_ptr.dtype.element_ty), mask=in_pair)

    head = tl.arange(0, HEADS)[:, None].to(tl.int64)
    mask = (head < num_heads) & in_pair[None, :]
    q_rows = q_ptr + token * q_stride + head * q_head_stride
    q1 = tl.load(q_rows + first[None, :], mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(q_rows + second[None, :], mask=mask, other=0.0).to(tl.float32)
    q_out = q_out_ptr + (token * num_heads + head) * (2 * half)
    tl.store(q_out + first[None, :], (q1 * cos[None, :] - q2 * sin[None, :]).to(q_out_ptr.dtype.element_ty), mask=mask)
    tl.store(q_out + second[None, :], (q2 * cos[None, :] + q1 * sin[None, :]).to(q_out_ptr.dtype.element_ty), mask=mask)
