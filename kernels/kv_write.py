"""Writes a step's latent keys and rotary keys into their cache slots. It knows slots, not requests."""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton


def write_latent_kv(kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Slot `slot_mapping[t]` of the cache holds [kv_c[t], k_pe[t]]; a slot of -1 writes nothing anywhere.

    kv_c: [T, R], k_pe: [T, P], rows may be strided; slot_mapping: [T] int64, distinct where not negative;
    kv_cache: [num_blocks, block_size, R + P], contiguous, same dtype. Raises: ValueError on a wrong dtype or shape.
    """
    check("kv_c", kv_c, kv_c.dtype, None, None)
    check("k_pe", k_pe, kv_c.dtype, kv_c.shape[0], None)
    check("slot_mapping", slot_mapping, torch.int64, kv_c.shape[0])
    check("kv_cache", kv_cache, kv_c.dtype, None, None, kv_c.shape[1] + k_pe.shape[1])
    check_same_device(kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping, kv_cache=kv_cache)
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache: expected a contiguous tensor")
    (write_latent_kv_triton if kv_c.is_cuda else write_latent_kv_torch)(kv_c, k_pe, slot_mapping, kv_cache)


def write_latent_kv_torch(
    kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor
) -> None:
    """Do what `write_latent_kv` does, in plain torch."""
    rows = torch.cat([kv_c, k_pe], dim=-1)
    written = slot_mapping >= 0
    if not bool(written.all()):
        rows, slot_mapping = rows[written], slot_mapping[written]
    kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, slot_mapping, rows)


def write_latent_kv_triton(
    kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor
) -> None:
    """Do what `write_latent_kv` does, by one program a token."""
    if kv_c.shape[0]:
        _write_latent_kv_kernel[(kv_c.shape[0],)](
            kv_c,
            kv_c.stride(0),
            k_pe,
            k_pe.stride(0),
            slot_mapping,
            kv_cache,
            kv_c.shape[1],
            k_pe.shape[1],
            BLOCK=triton.next_power_of_2(kv_cache.shape[-1]),
        )


@triton.jit
def _write_latent_kv_kernel(
    kv_c_ptr, kv_c_stride, k_pe_ptr, k_pe_stride, slot_mapping_ptr, cache_ptr, rank, rope_width, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        is_latent = column < rank
        is_rope = (column >= rank) & (column < rank + rope_width)
        latent = tl.load(kv_c_ptr + token * kv_c_stride + column, mask=is_latent, other=0.0)
        rope = tl.load(k_pe_ptr + token * k_pe_stride + column - rank, mask=is_rope, other=0.0)
        target = cache_ptr + slot * (rank + rope_width) + column
        tl.store(target, tl.where(is_latent, latent, rope), mask=is_latent | is_rope)
