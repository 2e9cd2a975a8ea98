"""Strict verification: accept drafts while they equal the token the target sampled, and count what that leaves.

Knows: ids, row ranges, and which ids and lengths end a row. Doesn't know logits, noise or probabilities: the target's
tokens were sampled before, one a row.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 256


def rejection_sample(
    target_sampled: torch.Tensor, draft_ids: torch.Tensor, cu_num_logits: torch.Tensor, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens each request emits, `(sampled [B, K+1] int64 filled with -1, num_sampled [B] int32)`.

    `target_sampled [N] int64`: the target's token at every logits row. `draft_ids [N] int64`: the input ids of those
    rows, so the draft judged at row i is `draft_ids[i + 1]`; -1 is a placeholder and never accepted. `cu_num_logits
    [B+1] int32`: request b owns rows `[cu[b], cu[b+1])`, at most K + 1; no rows, no tokens. Every row up to and
    including the first mismatch emits the target's token; if all drafts match, the last row's token is the bonus.
    Raises: ValueError on a wrong dtype, shape or layout. Source: design section 3 (accept iff equal).
    """
    check("target_sampled", target_sampled, torch.int64, None)
    check("draft_ids", draft_ids, torch.int64, target_sampled.shape[0])
    check("cu_num_logits", cu_num_logits, torch.int32, None)
    check_same_device(target_sampled=target_sampled, draft_ids=draft_ids, cu_num_logits=cu_num_logits)
    if num_speculative_tokens < 0 or cu_num_logits.shape[0] == 0:
        raise ValueError("num_speculative_tokens must be at least 0 and cu_num_logits must have B + 1 entries")
    op = rejection_sample_triton if target_sampled.is_cuda else rejection_sample_torch
    return op(target_sampled, draft_ids, cu_num_logits, num_speculative_tokens)


def rejection_sample_torch(
    target_sampled: torch.Tensor, draft_ids: torch.Tensor, cu_num_logits: torch.Tensor, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rejection_sample` returns, by torch operations."""
    num_reqs, width, num_rows = cu_num_logits.shape[0] - 1, num_speculative_tokens + 1, target_sampled.shape[0]
    if num_rows == 0:
        return torch.full((num_reqs, width), -1), torch.zeros(num_reqs, dtype=torch.int32)
    starts, counts = cu_num_logits[:-1, None].long(), cu_num_logits.diff()[:, None]
    column = torch.arange(width)
    rows = starts + column
    target = target_sampled[rows.clamp(max=num_rows - 1)]
    draft = draft_ids[(rows + 1).clamp(max=num_rows - 1)]
    matched = (target == draft) & (draft >= 0) & (column + 1 < counts)
    # A row is reached if every row before it matched.
    reached = torch.ones_like(matched)
    reached[:, 1:] = matched[:, :-1].cumprod(dim=1).bool()
    reached &= column < counts
    return torch.where(reached, target, -1), reached.sum(dim=1, dtype=torch.int32)


@triton.jit
def _rejection_sample_kernel(
    sampled_ptr, num_sampled_ptr, target_ptr, draft_ptr, cu_num_logits_ptr, WIDTH: tl.constexpr
):
    req = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64) - start
    going = num_rows > 0
    num_sampled = 0
    for i in range(WIDTH):
        going = going & (i < num_rows)
        token = tl.load(target_ptr + start + i, mask=going, other=-1)
        tl.store(sampled_ptr + req * WIDTH + i, token)
        num_sampled += going.to(tl.int32)
        draft = tl.load(draft_ptr + start + i + 1, mask=going & (i + 1 < num_rows), other=-1)
        going = going & (draft >= 0) & (draft == token)
    tl.store(num_sampled_ptr + req, num_sampled)


def rejection_sample_triton(
    target_sampled: torch.Tensor, draft_ids: torch.Tensor, cu_num_logits: torch.Tensor, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rejection_sample` returns, by one program a request."""
    num_reqs, width = cu_num_logits.shape[0] - 1, num_speculative_tokens + 1
    sampled = torch.empty((num_reqs, width), dtype=torch.int64, device=target_sampled.device)
    num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=target_sampled.device)
    if num_reqs:
        _rejection_sample_kernel[(num_reqs,)](
            sampled, num_sampled, target_sampled, draft_ids, cu_num_logits, WIDTH=width, num_warps=1
        )
    return sampled, num_sampled


def get_num_sampled_and_rejected(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    *,
    prefill_len: torch.Tensor,
    total_len: torch.Tensor,
    max_total_len: torch.Tensor,
    end_mask: torch.Tensor,
    finished: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(num_sampled [B] int32, num_rejected [B] int32)`: what counts after a step, and mark who is finished.

    An unfinished prefill (`seq_lens < prefill_len[slot]`) and a padded row (slot -1) have sampled and rejected nothing.
    A row ends with the first of its tokens `sampled [B, K+1] int64` that is in the slot's set `end_mask [R, ceil(V/32)]
    int32` (bit v % 32 of word v // 32) or brings it to `max_total_len` tokens, `total_len` of which it had: what is
    behind counts no more, and `finished[slot]` becomes 1, in place. Rejected = logits rows - sampled. `num_sampled`,
    `seq_lens`, `idx_mapping [B] int32`, `cu_num_logits [B+1] int32`, all `*_len`, `finished [R] int32`.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_reqs, num_slots = num_sampled.shape[0], prefill_len.shape[0]
    check("sampled", sampled, torch.int64, num_reqs, None)
    check("num_sampled", num_sampled, torch.int32, num_reqs)
    check("seq_lens", seq_lens, torch.int32, num_reqs)
    check("cu_num_logits", cu_num_logits, torch.int32, num_reqs + 1)
    check("idx_mapping", idx_mapping, torch.int32, num_reqs)
    check("prefill_len", prefill_len, torch.int32, num_slots)
    check("total_len", total_len, torch.int32, num_slots)
    check("max_total_len", max_total_len, torch.int32, num_slots)
    check("end_mask", end_mask, torch.int32, num_slots, None)
    check("finished", finished, torch.int32, num_slots)
    check_same_device(num_sampled=num_sampled, idx_mapping=idx_mapping, end_mask=end_mask, finished=finished)
    op = get_num_sampled_and_rejected_triton if num_sampled.is_cuda else get_num_sampled_and_rejected_torch
    return op(
        sampled,
        num_sampled,
        seq_lens,
        cu_num_logits,
        idx_mapping,
        prefill_len=prefill_len,
        total_len=total_len,
        max_total_len=max_total_len,
        end_mask=end_mask,
        finished=finished,
    )


def get_num_sampled_and_rejected_torch(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    *,
    prefill_len: torch.Tensor,
    total_len: torch.Tensor,
    max_total_len: torch.Tensor,
    end_mask: torch.Tensor,
    finished: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `get_num_sampled_and_rejected` returns, by torch operations."""
    slots = idx_mapping.long().clamp(min=0)
    counts = (idx_mapping >= 0) & (seq_lens >= prefill_len[slots])
    column = torch.arange(sampled.shape[1])
    word = end_mask[slots[:, None], (sampled // 32).clamp(min=0)]
    ends = ((word >> (sampled % 32)) & 1).bool()
    ends |= total_len[slots, None] + column + 1 >= max_total_len[slots, None]
    ends &= (column < num_sampled[:, None]) & counts[:, None]
    first = torch.where(ends, column + 1, sampled.shape[1] + 1).amin(dim=1)
    kept = torch.minimum(num_sampled, first) * counts
    finished[slots[ends.any(dim=1)]] = 1
    return kept.int(), ((cu_num_logits.diff() - kept) * counts).int()


@triton.jit
def _num_sampled_and_rejected_kernel(
    out_sampled_ptr,
    out_rejected_ptr,
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    seq_lens_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    prefill_len_ptr,
    total_len_ptr,
    max_total_len_ptr,
    end_mask_ptr,
    end_mask_stride,
    finished_ptr,
    WIDTH: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    live = slot >= 0
    prefill_len = tl.load(prefill_len_ptr + slot, mask=live, other=0)
    counts = live & (tl.load(seq_lens_ptr + req) >= prefill_len)
    num_sampled = tl.where(counts, tl.load(num_sampled_ptr + req), 0)
    num_left = tl.load(max_total_len_ptr + slot, mask=live, other=0)
    num_left -= tl.load(total_len_ptr + slot, mask=live, other=0)
    kept = 0
    going = num_sampled > 0
    for i in range(WIDTH):
        token = tl.load(sampled_ptr + req * sampled_stride + i, mask=going, other=0)
        word = tl.load(end_mask_ptr + slot * end_mask_stride + token // 32, mask=going, other=0)
        kept += going.to(tl.int32)
        ends = (((word >> (token % 32).to(tl.int32)) & 1) != 0) | (i + 1 >= num_left)
        tl.store(finished_ptr + slot, 1, mask=going & ends)
        going = going & (ends == 0) & (i + 1 < num_sampled)
    num_rows = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    tl.store(out_sampled_ptr + req, kept)
    tl.store(out_rejected_ptr + req, tl.where(counts, num_rows - kept, 0))


def get_num_sampled_and_rejected_triton(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    *,
    prefill_len: torch.Tensor,
    total_len: torch.Tensor,
    max_total_len: torch.Tensor,
    end_mask: torch.Tensor,
    finished: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `get_num_sampled_and_rejected` returns, by one program a request."""
    out_sampled, out_rejected = torch.empty_like(num_sampled), torch.empty_like(num_sampled)
    if num_sampled.shape[0]:
        _num_sampled_and_rejected_kernel[(num_sampled.shape[0],)](
            out_sampled,
            out_rejected,
            sampled,
            sampled.stride(0),
            num_sampled,
            seq_lens,
            cu_num_logits,
            idx_mapping,
            prefill_len,
            total_len,
            max_total_len,
            end_mask,
            end_mask.stride(0),
            finished,
            WIDTH=sampled.shape[1],
            num_warps=1,
        )
    return out_sampled, out_rejected


def live_slots(slots: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Return `slots [N] int32` with -1, a padded row's, in place of those that are finished (`finished [R] int32`).

    So that a step which was launched before the host knew of a row's end does nothing for it.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("slots", slots, torch.int32, None)
    check("finished", finished, torch.int32, None)
    check_same_device(slots=slots, finished=finished)
    return live_slots_triton(slots, finished) if slots.is_cuda else live_slots_torch(slots, finished)


def live_slots_torch(slots: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Return what `live_slots` returns, by torch operations."""
    return torch.where(finished[slots.long()] == 0, slots, -1)  # -1 reads the last entry, and stays


@triton.jit(do_not_specialize=["num_slots"])
def _live_slots_kernel(out_ptr, slots_ptr, finished_ptr, num_slots, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + at, mask=at < num_slots, other=-1)
    finished = tl.load(finished_ptr + slot, mask=slot >= 0, other=0)
    tl.store(out_ptr + at, tl.where(finished == 0, slot, -1), mask=at < num_slots)


def live_slots_triton(slots: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Return what `live_slots` returns, by one program a block of rows."""
    out = torch.empty_like(slots)
    if slots.shape[0]:
        grid = (triton.cdiv(slots.shape[0], _BLOCK),)
        _live_slots_kernel[grid](out, slots, finished, slots.shape[0], BLOCK=_BLOCK, num_warps=1)
    return out
