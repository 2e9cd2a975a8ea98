"""Accepts drafts by lot instead of by what they are, so that speed can be measured at a chosen acceptance.

Knows: ids, row ranges and rates. Doesn't know what the target thinks of a draft. A draft's lot is a uniform number that
is a pure function of (row seed, position): the same in kernel and twin, whatever else is in the batch.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._draw import _mix_word
from specgen.kernels._triton import tl, triton
from specgen.kernels.gumbel import _finish, _key_state, _word

# Last word of the hash in place of a token id, which is never this large: other numbers than the Gumbel noise.
_DOMAIN = 0x7FFFFFFF
_SCALE = 2.0**-24


def conditional_rates(rates: tuple[float, ...]) -> list[float]:
    """Return P(draft i accepted | all before it were), for `rates[i]` = P(the first i + 1 drafts accepted).

    Source: vLLM's `synthetic_acceptance_rates`, which are unconditional as well.
    """
    before = (1.0, *rates)
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=False)]


def synthetic_rejection_sample(
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(sampled [B, K+1] int64 filled with -1, num_sampled [B] int32)` with drafts accepted at `rates`.

    `target_sampled`, `draft_ids`, `cu_num_logits` as in `rejection_sample`; every emitted token is the target's.
    `row_slots [N] int32` (-1 = padded: its drafts are refused) and `positions [N] int64` of the logits rows, `seeds [R]
    int64`, `rates [K] float32`, conditional: draft i is accepted if u(seed, its position) < rates[i], all before it
    were accepted, and it is no placeholder (-1). Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_rows = target_sampled.shape[0]
    check("target_sampled", target_sampled, torch.int64, None)
    check("draft_ids", draft_ids, torch.int64, num_rows)
    check("cu_num_logits", cu_num_logits, torch.int32, None)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("positions", positions, torch.int64, num_rows)
    check("seeds", seeds, torch.int64, None)
    check("rates", rates, torch.float32, None)
    check_same_device(
        target_sampled=target_sampled,
        draft_ids=draft_ids,
        cu_num_logits=cu_num_logits,
        row_slots=row_slots,
        positions=positions,
        seeds=seeds,
        rates=rates,
    )
    if cu_num_logits.shape[0] == 0:
        raise ValueError("cu_num_logits must have B + 1 entries")
    op = synthetic_rejection_sample_triton if target_sampled.is_cuda else synthetic_rejection_sample_torch
    return op(target_sampled, draft_ids, cu_num_logits, row_slots, positions, seeds, rates)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return u(seed, position) in [0, 1), `[N] float32`, for `seeds [N]` and `positions [N] int64`."""
    state = _key_state(seeds, positions)
    word = _word(torch.tensor(_DOMAIN, dtype=torch.int32))
    hashed = _finish(state ^ word, torch.empty_like(state))
    return ((hashed >> 8) & 0xFFFFFF).float() * _SCALE


def synthetic_rejection_sample_torch(
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `synthetic_rejection_sample` returns, by torch operations."""
    num_reqs, width, num_rows = cu_num_logits.shape[0] - 1, rates.shape[0] + 1, target_sampled.shape[0]
    if num_rows == 0:
        return torch.full((num_reqs, width), -1), torch.zeros(num_reqs, dtype=torch.int32)
    starts, counts = cu_num_logits[:-1, None].long(), cu_num_logits.diff()[:, None]
    column = torch.arange(width)
    rows = starts + column
    judged = (rows + 1).clamp(max=num_rows - 1)
    slots = row_slots[judged].long()
    drawn = uniforms(seeds[slots.clamp(min=0)].flatten(), positions[judged].flatten()).view(num_reqs, width)
    lucky = drawn < torch.cat([rates, rates.new_zeros(1)])
    accepted = lucky & (draft_ids[judged] >= 0) & (slots >= 0) & (column + 1 < counts)
    # A row is reached if every draft before it was accepted.
    reached = torch.ones_like(accepted)
    reached[:, 1:] = accepted[:, :-1].cumprod(dim=1).bool()
    reached &= column < counts
    target = target_sampled[rows.clamp(max=num_rows - 1)]
    return torch.where(reached, target, -1), reached.sum(dim=1, dtype=torch.int32)


@triton.jit
def _uniform_of(seed, position):
    state = _mix_word((position * 0).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, (position * 0 + 0x7FFFFFFF).to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    return (state >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _synthetic_rejection_kernel(
    sampled_ptr,
    num_sampled_ptr,
    target_ptr,
    draft_ptr,
    cu_num_logits_ptr,
    row_slots_ptr,
    positions_ptr,
    seeds_ptr,
    rates_ptr,
    WIDTH: tl.constexpr,
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
        judged = start + i + 1
        going = going & (i + 1 < num_rows) & (i + 1 < WIDTH)
        draft = tl.load(draft_ptr + judged, mask=going, other=-1)
        slot = tl.load(row_slots_ptr + judged, mask=going, other=-1).to(tl.int64)
        going = going & (draft >= 0) & (slot >= 0)
        seed = tl.load(seeds_ptr + slot, mask=going, other=0)
        position = tl.load(positions_ptr + judged, mask=going, other=0)
        rate = tl.load(rates_ptr + i, mask=going, other=0.0)
        going = going & (_uniform_of(seed, position) < rate)
    tl.store(num_sampled_ptr + req, num_sampled)


def synthetic_rejection_sample_triton(
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `synthetic_rejection_sample` returns, by one program a request."""
    num_reqs, width = cu_num_logits.shape[0] - 1, rates.shape[0] + 1
    sampled = torch.empty((num_reqs, width), dtype=torch.int64, device=target_sampled.device)
    num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=target_sampled.device)
    if num_reqs:
        _synthetic_rejection_kernel[(num_reqs,)](
            sampled,
            num_sampled,
            target_sampled,
            draft_ids,
            cu_num_logits,
            row_slots,
            positions,
            seeds,
            rates,
            WIDTH=width,
            num_warps=1,
        )
    return sampled, num_sampled
