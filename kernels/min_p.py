"""The min-p filter: logits too far below their row's largest become -inf.

Knows: one row's logits and how far below the top it may reach, -ln(min_p). p[v] >= min_p * p[top] is the same as
logit[top] - logit[v] <= -ln(min_p): no softmax, no sum, and so nothing that depends on how a row is split.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 4096


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
    op = apply_min_p_triton if logits.is_cuda else apply_min_p_torch
    op(logits, row_slots, min_p_reach)


def apply_min_p_torch(logits: torch.Tensor, row_slots: torch.Tensor, min_p_reach: torch.Tensor) -> None:
    """Do what `apply_min_p` does, by torch operations."""
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


@triton.jit
def _block_top_kernel(
    tops_ptr, logits_ptr, logits_stride, row_slots_ptr, min_p_reach_ptr, vocab_size, BLOCK: tl.constexpr
):
    """The largest logit of each block of a row that has the filter on, NaN left out."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(min_p_reach_ptr + slot) == float("inf"):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    logits = tl.where(logits != logits, float("-inf"), logits)
    tl.store(tops_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(logits, axis=0))


@triton.jit
def _min_p_kernel(
    tops_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    min_p_reach_ptr,
    vocab_size,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    reach = tl.load(min_p_reach_ptr + slot)
    if reach == float("inf"):
        return
    num_blocks = tl.num_programs(1)
    block = tl.arange(0, BLOCKS)
    tops = tl.load(tops_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    threshold = tl.max(tops, axis=0) - reach
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    at = logits_ptr + row * logits_stride + token
    logits = tl.load(at, mask=inside, other=0.0)
    removed = (logits >= threshold) == 0  # true for NaN
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & removed)


def apply_min_p_triton(logits: torch.Tensor, row_slots: torch.Tensor, min_p_reach: torch.Tensor) -> None:
    """Do what `apply_min_p` does: the blocks' largest logits, then the filter, each by a (rows x blocks) grid."""
    num_rows, vocab = logits.shape
    if not logits.numel():
        return
    grid = (num_rows, triton.cdiv(vocab, _BLOCK))
    tops = torch.empty(grid, dtype=torch.float32, device=logits.device)
    args = (tops, logits, logits.stride(0), row_slots, min_p_reach, vocab)
    _block_top_kernel[grid](*args, BLOCK=_BLOCK)
    _min_p_kernel[grid](*args, BLOCKS=triton.next_power_of_2(grid[1]), BLOCK=_BLOCK)
