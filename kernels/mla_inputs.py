"""What latent attention reads of a step: the tokens' latents in the cache, and the queries' rotary part.

Norm, rotation and cache write in one pass over a token. The rotary table comes from `models.rope_table`.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._kv_cache import check_kv_cache, store_kv, write_rows
from specgen.kernels._triton import pdl, start_next_and_wait, tl, triton
from specgen.kernels.rms_norm import rms_norm_torch
from specgen.kernels.rope import apply_rope


def mla_inputs(
    latent: torch.Tensor,
    q_pe: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
) -> None:
    """Write [norm(latent[t, :R]), rotated latent[t, R:]] to cache slot `slot_mapping[t]`, rotated q_pe to q[..., R:].

    latent: [T, R + P] and q_pe: [T, H, P], rows and heads may be strided; norm_weight: [R], same dtype; positions: [T]
    int64, clamped into the table; cos_sin: [max_pos, P] float32, see `apply_rope`; slot_mapping: [T] int64, -1 writes
    nothing; kv_cache: [num_blocks, block_size, R + P], same dtype or FP8, contiguous; q: [T, H, R + P], contiguous, its
    first R columns stay. With H = 0 only the cache is written. Raises: ValueError on a wrong dtype or shape.
    Source: DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19.
    """
    num_tokens, width = latent.shape
    rank, rope = norm_weight.shape[0], q_pe.shape[2]
    check("latent", latent, latent.dtype, None, rank + rope)
    check("q_pe", q_pe, latent.dtype, num_tokens, None, None)
    check("norm_weight", norm_weight, latent.dtype, None)
    check("positions", positions, torch.int64, num_tokens)
    check("cos_sin", cos_sin, torch.float32, None, rope)
    check("slot_mapping", slot_mapping, torch.int64, num_tokens)
    check_kv_cache(kv_cache, latent.dtype, width)
    check("q", q, latent.dtype, num_tokens, q_pe.shape[1], width)
    check_same_device(
        latent=latent, q_pe=q_pe, norm_weight=norm_weight, positions=positions, cos_sin=cos_sin,
        slot_mapping=slot_mapping, kv_cache=kv_cache, q=q,
    )  # fmt: skip
    if not q.is_contiguous():
        raise ValueError("q: expected a contiguous tensor")
    if rope % 2 or cos_sin.shape[0] == 0:
        raise ValueError(f"rope needs an even width and a table, got {rope} and {cos_sin.shape[0]} positions")
    run = mla_inputs_triton if latent.is_cuda else mla_inputs_torch
    run(latent, q_pe, norm_weight, eps, positions, cos_sin, interleaved, slot_mapping, kv_cache, q)


def mla_inputs_torch(
    latent: torch.Tensor,
    q_pe: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
) -> None:
    """Do what `mla_inputs` does, in plain torch."""
    rank = norm_weight.shape[0]
    kv_c, k_pe = latent[:, :rank], latent[:, rank:]
    normed = rms_norm_torch(kv_c, norm_weight, eps)
    assert isinstance(normed, torch.Tensor)
    q_pe, k_pe = apply_rope(q_pe, k_pe, positions, cos_sin, interleaved)
    write_rows(kv_cache, slot_mapping, torch.cat([normed, k_pe], dim=-1))
    q[..., rank:] = q_pe


def mla_inputs_triton(
    latent: torch.Tensor,
    q_pe: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
) -> None:
    """Do what `mla_inputs` does, by one program a token."""
    num_tokens, num_heads, rope = q_pe.shape
    rank = norm_weight.shape[0]
    if num_tokens:
        _mla_inputs_kernel[(num_tokens,)](
            latent, latent.stride(0), q_pe, q_pe.stride(0), q_pe.stride(1), norm_weight, eps, positions, cos_sin,
            cos_sin.stride(0), cos_sin.shape[0], slot_mapping, kv_cache, q, num_heads, rank, rope // 2,
            INTERLEAVED=interleaved, HEADS=triton.next_power_of_2(num_heads) if num_heads else 0,
            RANK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rope // 2), num_warps=4, **pdl(),
        )  # fmt: skip


@triton.jit
def _load_pairs(rows, mask, half, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Return the first and the second elements of the pairs of `rows [ROWS, 1]`, each `[ROWS, HALF]`, in float32."""
    if INTERLEAVED:  # neighbours are loaded together
        column = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(rows + column, mask=mask & (column < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
    else:
        pair = tl.arange(0, HALF)[None, :]
        first = tl.load(rows + pair, mask=mask & (pair < half), other=0.0).to(tl.float32)
        second = tl.load(rows + half + pair, mask=mask & (pair < half), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(rows, first, second, mask, half, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The counterpart of `_load_pairs`."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        x = tl.reshape(tl.join(first, second), [ROWS, 2 * HALF])
        store_kv(rows + column, x, mask & (column < 2 * half))
    else:
        pair = tl.arange(0, HALF)[None, :]
        store_kv(rows + pair, first, mask & (pair < half))
        store_kv(rows + half + pair, second, mask & (pair < half))


@triton.jit
def _mla_inputs_kernel(
    latent_ptr,
    latent_stride,
    q_pe_ptr,
    q_pe_stride,
    q_pe_head_stride,
    norm_weight_ptr,
    eps,
    positions_ptr,
    table_ptr,
    table_stride,
    max_positions,
    slot_mapping_ptr,
    cache_ptr,
    q_ptr,
    num_heads,
    rank,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, RANK)
    in_rank = column < rank
    weight = tl.load(norm_weight_ptr + column, mask=in_rank, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1)
    pair = tl.arange(0, HALF)[None, :]
    in_pair = pair < half
    cos = tl.load(table_ptr + position * table_stride + pair, mask=in_pair, other=0.0)
    sin = tl.load(table_ptr + position * table_stride + half + pair, mask=in_pair, other=0.0)
    width = rank + 2 * half
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    if slot >= 0:
        row = latent_ptr + token * latent_stride
        target = cache_ptr + slot * width
        wide = tl.load(row + column, mask=in_rank, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)
        normed = (wide * scale).to(dtype).to(tl.float32)
        store_kv(target + column, (normed * weight).to(dtype), in_rank)
        one = tl.arange(0, 1)[:, None]
        k1, k2 = _load_pairs(row + rank + one, one == 0, half, INTERLEAVED, 1, HALF)
        k1, k2 = k1 * cos - k2 * sin, k2 * cos + k1 * sin
        _store_pairs(target + rank + one, k1.to(dtype), k2.to(dtype), one == 0, half, INTERLEAVED, 1, HALF)

    if HEADS > 0:
        head = tl.arange(0, HEADS)[:, None].to(tl.int64)
        is_head = head < num_heads
        q_rows = q_pe_ptr + token * q_pe_stride + head * q_pe_head_stride
        q1, q2 = _load_pairs(q_rows, is_head, half, INTERLEAVED, HEADS, HALF)
        q1, q2 = q1 * cos - q2 * sin, q2 * cos + q1 * sin
        q_out = q_ptr + (token * num_heads + head) * width + rank
        _store_pairs(q_out, q1.to(dtype), q2.to(dtype), is_head, half, INTERLEAVED, HEADS, HALF)
