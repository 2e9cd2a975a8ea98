"""Top-k and top-p (nucleus) filters: removed logits become -inf.

Knows: one row's logits and its two limits. Both filters keep all logits at or above a threshold, so ties stay or go
together. Probabilities are fixed-point integers (units of 2^-35 of the row's largest), whose sums have no order: a
row's result can't depend on how the sum was split. In plain torch: the twin. On the device,
`_filter_rows.py` draws from what the filters leave.
"""

import torch

from specgen.kernels._checks import check, check_same_device

_ONE = 2.0**35  # the weight of the row's largest logit; 150,000 such weights still add up exactly in float64
_NUM_BUCKETS = 1024  # the twin's buckets by distance from the top; weights are 0 before the last one
_BUCKETS_PER_UNIT = 40.0
_CHUNK_ELEMENTS = 1 << 18  # working set of the twin: stays in the second-level cache
_LARGEST = torch.finfo(torch.float32).max
_MINUS_INF = torch.tensor(-torch.inf)


def apply_top_k_top_p(logits: torch.Tensor, row_slots: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` keeps its top-k and, of those, its top-p set; the rest is -inf. In place.

    `row_slots [N] int32` (-1 = padded), `top_k [R] int32` (0 = off), `top_p [R] float32` (1 = off). Top-k keeps every
    logit that is at least the k-th largest. Top-p then keeps a logit iff the probability (renormalised after top-k)
    of all strictly larger ones is below p; the largest always stays. Rows with both off, and padded rows, are
    untouched; NaN is removed from the others.
    Raises: ValueError on a wrong dtype, shape or layout. Source: Holtzman et al., arXiv 1904.09751 (nucleus sampling).
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("top_k", top_k, torch.int32, None)
    check("top_p", top_p, torch.float32, top_k.shape[0])
    check_same_device(logits=logits, row_slots=row_slots, top_k=top_k, top_p=top_p)
    vocab = logits.shape[1]
    slots = row_slots.long().clamp(min=0)
    k, p = top_k[slots].double(), top_p[slots].double()
    live = row_slots >= 0
    for chosen, limit, by_mass in ((live & (k > 0) & (k < vocab), k, False), (live & (p < 1), p, True)):
        rows = chosen.nonzero().flatten()
        step = max(1, _CHUNK_ELEMENTS // vocab)
        for start in range(0, rows.numel(), step):
            part = rows[start : start + step]
            first, count = int(part[0]), part.numel()
            if int(part[-1]) - first == count - 1:
                block = logits[first : first + count]  # adjacent rows: a view
                torch.where(block >= _threshold(block, limit[part], by_mass), block, _MINUS_INF, out=block)
            else:
                block = logits[part]
                logits[part] = torch.where(block >= _threshold(block, limit[part], by_mass), block, _MINUS_INF)


def _threshold(logits: torch.Tensor, limit: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Return the smallest logit that top-k or (`by_mass`) top-p keeps in each row of `logits [n, V]`, as `[n, 1]`."""
    top = logits.amax(dim=1, keepdim=True)
    if not bool((top.abs() < torch.inf).all()):
        logits = torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_LARGEST)
        top = logits.amax(dim=1, keepdim=True).clamp_(min=-_LARGEST)
    below = top - logits
    if by_mass:
        # float64 inside, so that a library's last bit hardly ever reaches the integer; exp(-30) is 0 units.
        units = below.clamp(max=30.0).neg_().double().exp_().mul_(_ONE).long()
        wanted = (limit * units.sum(dim=1))[:, None]
    else:
        units = torch.ones((), dtype=torch.int64).expand(logits.shape)
        wanted = limit[:, None]
    return _edge(logits, below, units, wanted)


def _edge(logits: torch.Tensor, below: torch.Tensor, units: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit of each row, `[n, 1]`, above which the summed `units [n, V]` stay under `wanted [n,
    1]`.

    Sums by bucket of distance from the top, `below [n, V]`, find the bucket in which that happens; only its logits
    are put in order. Overwrites `below`.
    """
    num_rows = logits.shape[0]
    bucket = below.mul_(_BUCKETS_PER_UNIT).clamp_(max=_NUM_BUCKETS - 1).floor_()
    in_bucket = torch.zeros((num_rows, _NUM_BUCKETS), dtype=torch.int64).scatter_add_(1, bucket.long(), units)
    through = in_bucket.cumsum(dim=1)
    at = (through < wanted).sum(dim=1, keepdim=True).clamp(max=_NUM_BUCKETS - 1)
    above = (through - in_bucket).gather(1, at)

    rows, ids = (bucket == at.float()).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    column = torch.arange(rows.numel()) - (counts.cumsum(0) - counts)[rows]
    values = torch.full((num_rows, max(int(counts.max()), 1)), -torch.inf)
    values[rows, column] = logits[rows, ids]
    of_value = torch.zeros(values.shape, dtype=torch.int64)
    of_value[rows, column] = units[rows, ids]
    values, order = values.sort(dim=1, descending=True)
    of_value = of_value.gather(1, order)
    kept = (above + of_value.cumsum(dim=1) - of_value < wanted).sum(dim=1, keepdim=True)
    return values.gather(1, (kept - 1).clamp(min=0))
