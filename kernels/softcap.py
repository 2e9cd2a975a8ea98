"""The soft cap that some models put on their logits: cap * tanh(logit / cap). It knows nothing but the cap.

The twin is built of exp, division and products, whose bits do not depend on where an element lies (see `silu_mul.py`);
torch's tanh has another scalar tail.
"""

import torch

from specgen.kernels._checks import check
from specgen.kernels._triton import tl, triton

_BLOCK = 4096
_REACH = 10.0  # tanh of it is 1 in float32


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Each logit of `logits [N, V] float32` becomes cap * tanh(logit / cap), in place; returns them. NaN stays NaN.

    Raises: ValueError on a wrong dtype, shape or layout, or a cap that is not above 0. Source: Gemma 2, arXiv
    2408.00118, section 2.
    """
    check("logits", logits, torch.float32, None, None)
    if not cap > 0:
        raise ValueError(f"cap: expected a number above 0, got {cap}")
    return (softcap_triton if logits.is_cuda else softcap_torch)(logits, cap)


def softcap_torch(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Do what `softcap` does, by torch operations."""
    e = logits.div_(cap).clamp_(-_REACH, _REACH).mul_(2.0).exp_()
    denominator = e + 1.0
    return e.sub_(1.0).div_(denominator).mul_(cap)


@triton.jit
def _softcap_kernel(logits_ptr, logits_stride, cap, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < vocab_size
    ptr = logits_ptr + row * logits_stride + at
    logits = tl.load(ptr, mask=mask, other=0.0) / cap
    near = tl.where(logits > 10.0, 10.0, tl.where(logits < -10.0, -10.0, logits))  # NaN stays
    e = tl.exp(near * 2.0)
    tl.store(ptr, (e - 1.0) / (e + 1.0) * cap, mask=mask)


def softcap_triton(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Do what `softcap` does, by a (rows x vocabulary blocks) grid."""
    num_rows, vocab = logits.shape
    if logits.numel():
        _softcap_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](logits, logits.stride(0), cap, vocab, BLOCK=_BLOCK)
    return logits
