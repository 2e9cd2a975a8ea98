"""The typical-p filter: of a row's tokens, those whose surprise is nearest to the expected one, up to a probability.

Knows: one row's processed logits and its p. A token's surprise less the expected one is (top - logit) less the mean of
that distance, so that no normalised probability is needed. Probabilities are fixed-point integers as in
`top_k_top_p.py`, whose sums have no order: a row's result can't depend on how the sum was split.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._row_thresholds import _clean, _weight
from specgen.kernels._triton import tl, triton
from specgen.kernels.top_k_top_p import _LARGEST, _ONE, _edge

_BLOCK = 4096
_CHUNK_ELEMENTS = 1 << 18  # working set of the twin


def apply_typical_p(logits: torch.Tensor, row_slots: torch.Tensor, typical_p: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` keeps its most typical tokens that together hold its p; the rest is -inf. In
    place.

    A token is the more typical, the smaller |-log(probability) - entropy| is. It stays iff all strictly more typical
    ones together have less than p, so that equals stay or go together, and the most typical stays. `row_slots [N]
    int32` (-1 = padded), `typical_p [R] float32` (1 = off). Rows that are off, and padded rows, are untouched; NaN is
    removed from the others.
    Raises: ValueError on a wrong dtype, shape or layout. Source: Meister et al., arXiv 2202.00666.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("typical_p", typical_p, torch.float32, None)
    check_same_device(logits=logits, row_slots=row_slots, typical_p=typical_p)
    op = apply_typical_p_triton if logits.is_cuda else apply_typical_p_torch
    op(logits, row_slots, typical_p)


def apply_typical_p_torch(logits: torch.Tensor, row_slots: torch.Tensor, typical_p: torch.Tensor) -> None:
    """Do what `apply_typical_p` does, by torch operations."""
    p = typical_p[row_slots.long().clamp(min=0)].double()
    rows = ((row_slots >= 0) & (p < 1)).nonzero().flatten()
    step = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))
    for start in range(0, rows.numel(), step):
        part = rows[start : start + step]
        logits[part] = _filtered(logits[part], p[part, None])


def _filtered(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    clean = torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_LARGEST)
    below = clean.amax(dim=1, keepdim=True).clamp_(min=-_LARGEST) - clean
    # float64 inside, so that a library's last bit hardly ever reaches an integer; exp(-30) is 0 units.
    near = below.clamp(max=30.0).double()
    weight = near.neg().exp_().mul_(_ONE)
    units = weight.long()
    total = units.sum(dim=1, keepdim=True).clamp_(min=1)  # 0 where there is nothing but -inf and NaN
    mean = (weight * near).long().sum(dim=1, keepdim=True).double() / total
    distance = (below - mean.float()).abs_()
    last = _edge(-distance, distance.clone(), units, p * total)
    return torch.where((distance <= -last) & ~logits.isnan(), logits, -torch.inf)


@triton.jit
def _distance(logits, top, mean):
    return tl.abs((top - logits) - mean)


@triton.jit
def _typical_kernel(logits_ptr, logits_stride, row_slots_ptr, typical_p_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    p = tl.load(typical_p_ptr + slot)
    if p >= 1.0:
        return
    row_ptr = logits_ptr + row * logits_stride
    at = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tops = tl.maximum(
            tops, _clean(tl.load(row_ptr + start + at, mask=at < vocab_size - start, other=float("-inf")))
        )
    top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)
    sums = tl.zeros([BLOCK], tl.int64)
    weighted = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        logits = _clean(tl.load(row_ptr + start + at, mask=at < vocab_size - start, other=float("-inf")))
        near = tl.minimum(top - logits, 30.0)
        sums += _weight(logits, top)
        weighted += (tl.exp(-near) * near * 34359738368.0).to(tl.int64)
    total = tl.sum(sums, axis=0).to(tl.float64)
    mean = (tl.sum(weighted, axis=0).to(tl.float64) / total).to(tl.float32)
    wanted = p.to(tl.float64) * total
    # Halve the range of distances, [low, high] as integer images of floats >= 0, each end a distance that is there.
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        units = tl.zeros([BLOCK], tl.int64)
        highest = tl.full([BLOCK], 0, tl.int32)
        lowest = tl.full([BLOCK], 0x7F800000, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            inside = at < vocab_size - start
            logits = _clean(tl.load(row_ptr + start + at, mask=inside, other=float("-inf")))
            key = _distance(logits, top, mean).to(tl.int32, bitcast=True)
            under = key <= middle
            units += tl.where(inside & under, _weight(logits, top), 0)
            highest = tl.maximum(highest, tl.where(inside & under, key, 0))
            lowest = tl.minimum(lowest, tl.where(inside & (under == 0), key, 0x7F800000))
        if tl.sum(units, axis=0).to(tl.float64) >= wanted:
            high = tl.maximum(tl.max(highest, axis=0), low)
        else:
            low = tl.minimum(tl.min(lowest, axis=0), high)
    last = high.to(tl.float32, bitcast=True)
    for start in range(0, vocab_size, BLOCK):
        inside = at < vocab_size - start
        logits = tl.load(row_ptr + start + at, mask=inside, other=0.0)
        kept = (_distance(_clean(logits), top, mean) <= last) & (logits == logits)
        tl.store(row_ptr + start + at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & (kept == 0))


def apply_typical_p_triton(logits: torch.Tensor, row_slots: torch.Tensor, typical_p: torch.Tensor) -> None:
    """Do what `apply_typical_p` does, by one program a row."""
    num_rows, vocab = logits.shape
    if logits.numel():
        _typical_kernel[(num_rows,)](logits, logits.stride(0), row_slots, typical_p, vocab, BLOCK=_BLOCK, num_warps=8)
