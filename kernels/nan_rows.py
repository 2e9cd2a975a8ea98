"""Which logits rows hold a NaN: what a broken model, or a broken KV entry, leaves behind. Knows nothing else."""

import torch

from specgen.kernels._checks import check
from specgen.kernels._triton import tl, triton

_BLOCK = 8192


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return `[N] bool`: whether each row of `logits [N, V] float32` holds a NaN.

    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    return (nan_rows_triton if logits.is_cuda else nan_rows_torch)(logits)


def nan_rows_torch(logits: torch.Tensor) -> torch.Tensor:
    """Return what `nan_rows` returns: the largest of a row with a NaN is NaN."""
    return logits.amax(dim=1).isnan()


@triton.jit
def _nan_rows_kernel(out_ptr, logits_ptr, logits_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logits = tl.load(logits_ptr + row * logits_stride + start + at, mask=at < vocab_size - start, other=0.0)
        found = found | (logits != logits).to(tl.int32)
    tl.store(out_ptr + row, tl.max(found, axis=0) > 0)


def nan_rows_triton(logits: torch.Tensor) -> torch.Tensor:
    """Return what `nan_rows` returns, by one program a row."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        _nan_rows_kernel[(num_rows,)](out, logits, logits.stride(0), vocab, BLOCK=_BLOCK, num_warps=8)
    return out
