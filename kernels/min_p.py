"""The min-p filter: logits too far below their row's largest become -inf.

Knows: one row's logits and how far below the top it may reach, -ln(min_p). p[v] >= min_p * p[top] is the same as
logit[top] - logit[v] <= -ln(min_p): no softmax, no sum, and so nothing that depends on how a row is split. In
plain torch: the twin. On the device, `_filter_rows.py` draws from what the filter leaves.
"""

import torch

from specgen.kernels._checks import check, check_same_device


def apply_min_p(logits: torch.Tensor, row_slots: torch.Tensor, min_p_reach: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` keeps the logits >= its largest - its slot's reach; the rest is -inf. In
    place.

    `row_slots [N] int32` (-1 = padded), `min_p_reach [R] float32` = -ln(min_p), at least 0 (+inf = off). The largest
    and its equals always stay. Rows that are off, and padded rows, are untouched; NaN is removed from the others.
    Raises: ValueError on a wrong dtype, shape or layout. Source: Nguyen et al., arXiv 2407.01082.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("min_p_reach", min_p_reach, torch.float32, None)
    check_same_device(logits=logits, row_slots=row_slots, min_p_reach=min_p_reach)
    reach = min_p_reach[row_slots.long().clamp(min=0)]
    rows = ((row_slots >= 0) & (reach < torch.inf)).nonzero().flatten()
    if not rows.numel() or not logits.numel():
        return
    whole = rows.numel() == logits.shape[0]
    block = logits if whole else logits[rows]
    top = block.amax(dim=1, keepdim=True)
    if bool(top.isnan().any()):
        top = block.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(dim=1, keepdim=True)
    removed = (block >= top - reach[rows, None]).logical_not_()  # true for NaN
    block.masked_fill_(removed, -torch.inf)
    if not whole:
        logits[rows] = block
