"""What a KV cache holds: numbers of the run's own dtype, or FP8 (e4m3) at half of bfloat16's bytes.

FP8 numbers have no scale: they are cut to ±448 and rounded to nearest, ties to even, when they are written, and NaN
stays NaN; reading gives exactly these values in any wider dtype. A number's bits depend on nothing but itself.
"""

import torch

from specgen.kernels._checks import check
from specgen.kernels._triton import tl, triton
from specgen.kernels.float8_linear import FLOAT8

LARGEST = tl.constexpr(448.0)


def check_kv_cache(kv_cache: torch.Tensor, dtype: torch.dtype, width: int) -> None:
    """`kv_cache [num_blocks, block_size, width]` holds `dtype` or FP8, and is contiguous. Raises: ValueError."""
    if kv_cache.dtype not in (dtype, FLOAT8):
        raise ValueError(f"kv_cache: expected dtype {dtype} or {FLOAT8}, got {kv_cache.dtype}")
    check("kv_cache", kv_cache, kv_cache.dtype, None, None, width)
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache: expected a contiguous tensor")


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Return x as the cache holds it in FP8."""
    largest = torch.finfo(FLOAT8).max
    return x.clamp(-largest, largest).to(FLOAT8)  # the cast alone makes NaN of what is too large


def write_rows(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [T, width] to the cache's slots [T] int64, on the CPU; -1 writes nothing."""
    written = slot_mapping >= 0
    if not bool(written.all()):
        rows, slot_mapping = rows[written], slot_mapping[written]
    slots = kv_cache.view(-1, kv_cache.shape[-1])
    if kv_cache.dtype == FLOAT8:  # torch has no index_copy of it
        slots, rows = slots.view(torch.uint8), to_float8(rows).view(torch.uint8)
    slots.index_copy_(0, slot_mapping, rows)


@triton.jit
def store_kv(target, x, mask):
    """Store x, of the run's dtype, to the cache's `target` pointers."""
    dtype: tl.constexpr = target.dtype.element_ty
    if dtype == tl.float8e4nv:
        wide = x.to(tl.float32)
        wide = tl.where(wide > LARGEST, LARGEST, wide)  # unlike a clamp's, a comparison's NaN stays
        wide = tl.where(wide < -LARGEST, -LARGEST, wide)
        tl.store(target, wide.to(dtype), mask=mask)
    else:
        tl.store(target, x, mask=mask)
