"""Ratio verification: a draft is kept with probability min(1, p/q), and a refused one is replaced from max(p - q, 0).

Knows: the processed logits of target and draft at each judged position, and three noises that share nothing: the draft
was drawn with a key of its own (`DRAFT_STREAM`), u(seed, position) accepts, and g(seed, position, token), the target's
own Gumbel noise, draws what replaces it. Doesn't know rows of requests beyond "the next row is the same slot's".

What is emitted follows the target's distribution, but it depends on the drafts: unlike strict verification it isn't the
plain text.
"""

import itertools

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._draw import _gumbel_of
from specgen.kernels._triton import tl, triton
from specgen.kernels.gumbel import _key_state, _sample_rows
from specgen.kernels.synthetic_rejection import _uniform_of, uniforms

DRAFT_STREAM = 0x6A09E667F3BCC909  # a row's draft noise is that of the seed with these bits turned over
_BLOCK = 4096
_LARGEST = torch.finfo(torch.float32).max


def ratio_sample(
    logits: torch.Tensor,
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_count: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Return the token of each logits row, `[N] int64`: the draft it judges if that is accepted, else its replacement.

    Row n judges draft d = `draft_ids[n + 1]` if row n + 1 is of the same slot and d >= 0. p = softmax of `logits[n]`
    (`[N, V] float32`, processed and divided by the temperature), q = softmax of `draft_logits[slot, spec_count[n]]`
    (`[R, K, V] float32`, those d was drawn from). d is accepted iff u(seed, position) * q(d) < p(d); else the token is
    argmax of log(max(p - q, 0)) + g(seed, position, token), which is never d. Rows that judge nothing, rows at
    temperature 0 and rows where p - q has no positive part keep `target_sampled [N] int64`.
    `row_slots`, `spec_count [N] int32` (slot -1 = padded), `positions [N] int64`, `seeds [R] int64`, `temperature [R]
    float32`. Raises: ValueError on a wrong dtype, shape or layout.
    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    num_rows, vocab = logits.shape
    num_slots = seeds.shape[0]
    check("logits", logits, torch.float32, num_rows, vocab)
    check("target_sampled", target_sampled, torch.int64, num_rows)
    check("draft_ids", draft_ids, torch.int64, num_rows)
    check("draft_logits", draft_logits, torch.float32, num_slots, None, vocab)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("spec_count", spec_count, torch.int32, num_rows)
    check("positions", positions, torch.int64, num_rows)
    check("seeds", seeds, torch.int64, num_slots)
    check("temperature", temperature, torch.float32, num_slots)
    check_same_device(logits=logits, draft_ids=draft_ids, draft_logits=draft_logits, row_slots=row_slots, seeds=seeds)
    op = ratio_sample_triton if logits.is_cuda else ratio_sample_torch
    return op(logits, target_sampled, draft_ids, draft_logits, row_slots, spec_count, positions, seeds, temperature)


def ratio_sample_torch(
    logits: torch.Tensor,
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_count: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Return what `ratio_sample` returns, a row at a time, so that no row's bits depend on another."""
    out = target_sampled.clone()
    slots = row_slots.tolist()
    counts, drafts = spec_count.tolist(), draft_ids.tolist()
    lots = uniforms(seeds[row_slots.long().clamp(min=0)], positions).tolist()
    for n, (slot, following) in enumerate(itertools.pairwise(slots)):
        if slot < 0 or following != slot or drafts[n + 1] < 0 or counts[n] >= draft_logits.shape[1]:
            continue
        if not temperature[slot] > 0:
            continue
        draft = drafts[n + 1]
        p, q = _probabilities(logits[n]), _probabilities(draft_logits[slot, counts[n]])
        if lots[n] * float(q[draft]) < float(p[draft]):
            out[n] = draft
            continue
        rest = p - q
        if bool((rest > 0).any()):
            rest = torch.where(rest > 0, rest, 0.0).log()
            out[n] = _sample_rows(rest[None], _key_state(seeds[slot, None], positions[n, None]))[0]
    return out


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_LARGEST).softmax(0)


@triton.jit
def _clean(logits):
    logits = tl.where(logits != logits, float("-inf"), logits)
    return tl.minimum(logits, 3.4028234663852886e38)


@triton.jit
def _ratio_kernel(
    out_ptr,
    logits_ptr,
    logits_stride,
    target_ptr,
    draft_ids_ptr,
    draft_logits_ptr,
    draft_slot_stride,
    draft_stride,
    row_slots_ptr,
    spec_count_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    num_rows,
    num_drafts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    inside = row + 1 < num_rows
    following = tl.load(row_slots_ptr + row + 1, mask=inside, other=-1).to(tl.int64)
    draft = tl.load(draft_ids_ptr + row + 1, mask=inside, other=-1)
    column = tl.load(spec_count_ptr + row).to(tl.int64)
    judges = (slot >= 0) & (following == slot) & (draft >= 0) & (column < num_drafts)
    warm = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0) > 0.0
    tl.store(out_ptr + row, tl.load(target_ptr + row))
    if (judges & warm) == 0:
        return
    p_ptr = logits_ptr + row * logits_stride
    q_ptr = draft_logits_ptr + slot * draft_slot_stride + column * draft_stride
    at = tl.arange(0, BLOCK)
    p_top = tl.full([BLOCK], float("-inf"), tl.float32)
    q_top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        mask = at < vocab_size - start
        p_top = tl.maximum(p_top, _clean(tl.load(p_ptr + start + at, mask=mask, other=float("-inf"))))
        q_top = tl.maximum(q_top, _clean(tl.load(q_ptr + start + at, mask=mask, other=float("-inf"))))
    p_max = tl.max(p_top, axis=0)
    q_max = tl.max(q_top, axis=0)
    p_sums = tl.zeros([BLOCK], tl.float32)
    q_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        mask = at < vocab_size - start
        p_sums += tl.exp(_clean(tl.load(p_ptr + start + at, mask=mask, other=float("-inf"))) - p_max)
        q_sums += tl.exp(_clean(tl.load(q_ptr + start + at, mask=mask, other=float("-inf"))) - q_max)
    p_sum = tl.sum(p_sums, axis=0)
    q_sum = tl.sum(q_sums, axis=0)
    p_draft = tl.exp(_clean(tl.load(p_ptr + draft)) - p_max) / p_sum
    q_draft = tl.exp(_clean(tl.load(q_ptr + draft)) - q_max) / q_sum
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(positions_ptr + row)
    if _uniform_of(seed, position) * q_draft < p_draft:
        tl.store(out_ptr + row, draft)
        return
    best = float("-inf")
    winner = draft * 0 - 1
    for start in range(0, vocab_size, BLOCK):
        mask = at < vocab_size - start
        p = tl.exp(_clean(tl.load(p_ptr + start + at, mask=mask, other=float("-inf"))) - p_max) / p_sum
        q = tl.exp(_clean(tl.load(q_ptr + start + at, mask=mask, other=float("-inf"))) - q_max) / q_sum
        rest = p - q
        some = mask & (rest > 0.0)
        score = tl.log(tl.where(some, rest, 1.0)) + _gumbel_of(seed, position, start + at)
        block_best, block_at = tl.max(tl.where(some, score, float("-inf")), axis=0, return_indices=True)
        better = block_best > best
        winner = tl.where(better, (start + block_at).to(tl.int64), winner)
        best = tl.where(better, block_best, best)
    if winner >= 0:
        tl.store(out_ptr + row, winner)


def ratio_sample_triton(
    logits: torch.Tensor,
    target_sampled: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_count: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Return what `ratio_sample` returns, by one program a row."""
    num_rows, vocab = logits.shape
    out = torch.empty_like(target_sampled)
    if num_rows:
        _ratio_kernel[(num_rows,)](
            out,
            logits,
            logits.stride(0),
            target_sampled,
            draft_ids,
            draft_logits,
            draft_logits.stride(0),
            draft_logits.stride(1),
            row_slots,
            spec_count,
            positions,
            seeds,
            temperature,
            num_rows,
            draft_logits.shape[1],
            vocab,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out
