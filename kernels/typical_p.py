"""The typical-p filter: of a row's tokens, those whose surprise is nearest to the expected one, up to a probability.

Knows: one row's processed logits and its p. A token's surprise less the expected one is (top - logit) less the mean of
that distance, so that no normalised probability is needed. Probabilities are fixed-point integers as in
`top_k_top_p.py`, whose sums have no order: a row's result can't depend on how the sum was split. In plain torch: the
twin. On the device, `_filter_rows.py` draws from what the filter leaves.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels.top_k_top_p import _LARGEST, _ONE, _edge

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
