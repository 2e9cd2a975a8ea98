"""From logits to tokens in as few passes over the vocabulary as the rows need: every processor, and the draw.

Knows the order of the processors (`specgen.worker.sampler` says it) and the per-slot tables that they read. The twin
calls the processors one by one, each the twin of its own file. On the device,

    touch    logit_bias, n-grams and bad words: a few tokens a row, in place
    pass 1   allowed ids, least length, penalties and temperature, on one read of the logits. A row without filters is
             drawn from there, and its processed logits are not even written; a row with filters leaves statistics
    search   the threshold of top-k, top-p and min-p (`_row_thresholds.py`)
    pass 2   draws rows with filters, from the parts of them that hold a logit from the threshold on

What only sets -inf may come in any order before the filters, since nothing turns -inf into anything else.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._row_thresholds import BLOCK, SUB, RowStats, _clean, _limits, _store_stats, row_thresholds
from specgen.kernels._triton import tl, triton
from specgen.kernels.allowed_ids import apply_allowed_ids
from specgen.kernels.bad_words import apply_bad_words
from specgen.kernels.gumbel import _draw, gumbel_sample, gumbel_sample_triton
from specgen.kernels.logit_bias import apply_logit_bias
from specgen.kernels.min_p import apply_min_p
from specgen.kernels.min_tokens import apply_min_tokens
from specgen.kernels.nan_rows import nan_rows
from specgen.kernels.no_repeat_ngram import apply_no_repeat_ngram
from specgen.kernels.penalties import apply_penalties
from specgen.kernels.temperature import apply_temperature
from specgen.kernels.top_k_top_p import apply_top_k_top_p
from specgen.kernels.typical_p import apply_typical_p

# Of the kernels that draw: without fused multiply-adds, so that a row's bits do not depend on which of them drew it,
# nor on what else was compiled into that one.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


class LogitsRows(NamedTuple):
    """Which slot each logits row belongs to, where it stands, and which drafts precede it.

    row_slots, spec_start, spec_count `[N] int32` (slot -1 = padded); positions `[N] int64`, of the row's input token;
    spec_ids `[M] int64`, row n's drafts being `spec_ids[spec_start[n] : spec_start[n] + spec_count[n]]`.
    """

    row_slots: torch.Tensor
    positions: torch.Tensor
    spec_ids: torch.Tensor
    spec_start: torch.Tensor
    spec_count: torch.Tensor


class SamplingTables(NamedTuple):
    """What each slot wants, as the processors' own files describe it; `[R, …]`, the vocabulary's last."""

    seeds: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p_reach: torch.Tensor
    typical_p: torch.Tensor
    repetition_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    prompt_mask: torch.Tensor
    output_counts: torch.Tensor
    allowed_mask: torch.Tensor
    num_allowed: torch.Tensor
    end_mask: torch.Tensor
    first_end: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    num_biases: torch.Tensor
    bad_word_ids: torch.Tensor
    bad_word_ends: torch.Tensor
    num_bad_words: torch.Tensor
    ngram_size: torch.Tensor
    token_ids: torch.Tensor
    total_len: torch.Tensor


class Wanted(NamedTuple):
    """Which processors any row needs (what none needs is left out), and whether the processed logits are kept.

    filters: top-k or top-p. rules: allowed ids, biases, least length, bad words or n-grams. noise: any temperature
    above 0. Without `keep`, `logits` are spoilt.
    """

    rules: bool = False
    penalties: bool = False
    noise: bool = False
    filters: bool = False
    min_p: bool = False
    typical_p: bool = False
    keep: bool = False


class Sampled(NamedTuple):
    """`token_ids [N] int64`, and whether each row's logits held a NaN, `[N] bool`."""

    token_ids: torch.Tensor
    has_nan: torch.Tensor


def sample_tokens(
    logits: torch.Tensor, rows: LogitsRows, tables: SamplingTables, wanted: Wanted, sharpness: float = 1.0
) -> Sampled:
    """Return the token of each row of `logits [N, V] float32`, which are overwritten; 0 for a padded row.

    `sharpness`: what processed logits are multiplied with in the draw. Raises: ValueError on a wrong dtype, shape or
    layout.
    """
    num_rows, vocab = logits.shape
    check("logits", logits, torch.float32, num_rows, vocab)
    for name in ("row_slots", "spec_start", "spec_count"):
        check(name, getattr(rows, name), torch.int32, num_rows)
    check("positions", rows.positions, torch.int64, num_rows)
    check("output_counts", tables.output_counts, torch.int32, None, vocab)
    check_same_device(logits=logits, row_slots=rows.row_slots, temperature=tables.temperature)
    op = sample_tokens_triton if logits.is_cuda else sample_tokens_torch
    return op(logits, rows, tables, wanted, sharpness)


def _touch(logits: torch.Tensor, rows: LogitsRows, t: SamplingTables) -> None:
    """The rules that look back at a row's text."""
    spec = (rows.row_slots, rows.spec_ids, rows.spec_start, rows.spec_count)
    apply_no_repeat_ngram(logits, *spec, token_ids=t.token_ids, total_len=t.total_len, ngram_size=t.ngram_size)
    apply_bad_words(
        logits,
        *spec,
        token_ids=t.token_ids,
        total_len=t.total_len,
        bad_word_ids=t.bad_word_ids,
        bad_word_ends=t.bad_word_ends,
        num_bad_words=t.num_bad_words,
    )


def sample_tokens_torch(
    logits: torch.Tensor, rows: LogitsRows, tables: SamplingTables, wanted: Wanted, sharpness: float = 1.0
) -> Sampled:
    """Return what `sample_tokens` returns, by the processors one after another."""
    t, slots = tables, rows.row_slots
    if not (wanted.rules or wanted.penalties or wanted.noise or wanted.filters or wanted.min_p or wanted.typical_p):
        return _largest(logits, slots)
    has_nan = nan_rows(logits)
    if wanted.rules:
        apply_allowed_ids(logits, slots, t.allowed_mask, t.num_allowed)
        apply_logit_bias(logits, slots, t.bias_ids, t.bias_values, t.num_biases)
        apply_min_tokens(logits, slots, rows.positions, t.end_mask, t.first_end)
    if wanted.penalties:
        apply_penalties(
            logits,
            slots,
            rows.spec_ids,
            rows.spec_start,
            rows.spec_count,
            prompt_mask=t.prompt_mask,
            output_counts=t.output_counts,
            repetition_penalty=t.repetition_penalty,
            frequency_penalty=t.frequency_penalty,
            presence_penalty=t.presence_penalty,
        )
    if wanted.rules:
        _touch(logits, rows, t)
    if wanted.noise:
        apply_temperature(logits, slots, t.temperature)
    if wanted.filters:
        apply_top_k_top_p(logits, slots, t.top_k, t.top_p)
    if wanted.min_p:
        apply_min_p(logits, slots, t.min_p_reach)
    if wanted.typical_p:
        apply_typical_p(logits, slots, t.typical_p)
    return Sampled(gumbel_sample(logits, slots, rows.positions, t.seeds, t.temperature, sharpness), has_nan)


def _largest(logits: torch.Tensor, row_slots: torch.Tensor) -> Sampled:
    """The tokens of rows that are all greedy and have no processors, by one read of the logits."""
    best, ids = logits.max(dim=1)  # the first of equal maxima; NaN wins
    has_nan = best.isnan()
    if bool(has_nan.any()):
        ids = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(dim=1)
    return Sampled(ids.masked_fill_(row_slots < 0, 0), has_nan)


# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _penalised(
    logits,
    token,
    mask,
    row,
    slot,
    repetition,
    frequency,
    presence,
    spec_ids_ptr,
    spec_start_ptr,
    spec_count_ptr,
    prompt_mask_ptr,
    prompt_mask_stride,
    output_counts_ptr,
    output_counts_stride,
):
    """As in `penalties.py`."""
    count = tl.load(output_counts_ptr + slot * output_counts_stride + token, mask=mask, other=0)
    spec_start = tl.load(spec_start_ptr + row).to(tl.int64)
    for i in range(tl.load(spec_count_ptr + row)):
        count += (token == tl.load(spec_ids_ptr + spec_start + i)).to(tl.int32)
    word = tl.load(prompt_mask_ptr + slot * prompt_mask_stride + token // 32, mask=mask, other=0)
    in_prompt = ((word >> (token % 32)) & 1) != 0
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    value = tl.where(in_prompt | (count > 0), repeated, logits)
    value = value - frequency * count.to(tl.float32)
    return value - tl.where(count > 0, presence, 0.0)


@triton.jit
def _first_pass_kernel(
    best_ptr,
    best_id_ptr,
    has_nan_ptr,
    tops_ptr,
    sums_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    positions_ptr,
    spec_ids_ptr,
    spec_start_ptr,
    spec_count_ptr,
    seeds_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_mask_ptr,
    prompt_mask_stride,
    output_counts_ptr,
    output_counts_stride,
    allowed_mask_ptr,
    allowed_mask_stride,
    num_allowed_ptr,
    end_mask_ptr,
    end_mask_stride,
    first_end_ptr,
    sharpness,
    vocab_size,
    num_subs,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    FILTERS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    at = logits_ptr + row * logits_stride + token
    logits = tl.load(at, mask=mask, other=float("-inf"))
    odd = tl.max((logits != logits).to(tl.int32), axis=0)
    tl.store(has_nan_ptr + row * num_blocks + block, odd.to(tl.int8))
    changed = slot < 0
    if RULES:
        position = tl.load(positions_ptr + row)
        if tl.load(num_allowed_ptr + slot) > 0:
            word = tl.load(allowed_mask_ptr + slot * allowed_mask_stride + token // 32, mask=mask, other=0)
            logits = tl.where(((word >> (token % 32)) & 1) != 0, logits, float("-inf"))
            changed = slot >= 0
        if position + 1 < tl.load(first_end_ptr + slot):
            word = tl.load(end_mask_ptr + slot * end_mask_stride + token // 32, mask=mask, other=0)
            logits = tl.where(((word >> (token % 32)) & 1) != 0, float("-inf"), logits)
            changed = slot >= 0
    if PENALTIES:
        repetition = tl.load(repetition_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            logits = _penalised(
                logits,
                token,
                mask,
                row,
                slot,
                repetition,
                frequency,
                presence,
                spec_ids_ptr,
                spec_start_ptr,
                spec_count_ptr,
                prompt_mask_ptr,
                prompt_mask_stride,
                output_counts_ptr,
                output_counts_stride,
            )
            changed = slot >= 0
    is_random = slot < 0
    if NOISE:
        temperature = tl.load(temperature_ptr + slot)
        is_random = temperature > 0.0
        if is_random & (temperature != 1.0):
            logits = tl.div_rn(logits, temperature)
            changed = slot >= 0
    is_filtered = slot < 0
    if FILTERS:
        _k, _p, _reach, is_filtered = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, True)
    if changed & (is_filtered | KEEP):
        tl.store(at, logits, mask=mask)
    if FILTERS:  # noqa: SIM102 - decided when the kernel is compiled
        if is_filtered:
            inside = tl.where(mask, _clean(logits), float("-inf"))
            _store_stats(tops_ptr, sums_ptr, row, block, num_subs, num_blocks, inside, BLOCK, SUB)
    if is_filtered == 0:
        logits = tl.where(mask, logits, float("-inf"))
        seed = tl.load(seeds_ptr + slot)
        best, place = _draw(logits, block * BLOCK, seed, tl.load(positions_ptr + row), is_random, sharpness, BLOCK)
        tl.store(best_ptr + row * num_blocks + block, best)
        tl.store(best_id_ptr + row * num_blocks + block, block * BLOCK + place)


@triton.jit
def _second_pass_kernel(
    best_ptr,
    best_id_ptr,
    threshold_ptr,
    tops_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    sharpness,
    vocab_size,
    num_subs,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    _k, _p, _reach, is_filtered = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, True)
    if is_filtered == 0:
        return
    threshold = tl.load(threshold_ptr + row)
    out = row * tl.num_programs(1) + block
    sub = block * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB)
    top = tl.load(tops_ptr + row * num_subs + sub, mask=sub < num_subs, other=float("-inf"))
    is_wanted = (top >= threshold) & (top > float("-inf"))
    if KEEP:
        is_wanted = sub < num_subs  # what is removed is written, wherever it is
    if tl.max(is_wanted.to(tl.int32), axis=0) == 0:
        tl.store(best_ptr + out, float("-inf"))
        tl.store(best_id_ptr + out, block * BLOCK)
        return
    token = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    mask = is_wanted[:, None] & (token < vocab_size)
    at = logits_ptr + row * logits_stride + token
    logits = tl.load(at, mask=mask, other=float("-inf"))
    removed = (logits >= threshold) == 0  # true for NaN
    if KEEP:
        tl.store(at, tl.full([BLOCK // SUB, SUB], float("-inf"), tl.float32), mask=mask & removed)
    logits = tl.reshape(tl.where(removed, float("-inf"), logits), [BLOCK])
    is_random = tl.load(temperature_ptr + slot) > 0.0
    seed = tl.load(seeds_ptr + slot)
    best, place = _draw(logits, block * BLOCK, seed, tl.load(positions_ptr + row), is_random, sharpness, BLOCK)
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, block * BLOCK + place)


@triton.jit
def _join_kernel(
    out_ptr, has_nan_ptr, best_ptr, best_id_ptr, block_nan_ptr, row_slots_ptr, num_blocks, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_slots_ptr + row) < 0:
        tl.store(out_ptr + row, 0)
        tl.store(has_nan_ptr + row, False)
        return
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    best = tl.load(best_ptr + row * num_blocks + block, mask=inside, other=float("-inf"))
    winner = tl.argmax(best, axis=0)  # blocks are in order of ids: the first of equal blocks has the lowest id
    token = tl.load(best_id_ptr + row * num_blocks + winner)
    tl.store(out_ptr + row, tl.where(tl.max(best, axis=0) == float("-inf"), 0, token).to(tl.int64))
    odd = tl.load(block_nan_ptr + row * num_blocks + block, mask=inside, other=0)
    tl.store(has_nan_ptr + row, tl.max(odd.to(tl.int32), axis=0) > 0)


def sample_tokens_triton(
    logits: torch.Tensor, rows: LogitsRows, tables: SamplingTables, wanted: Wanted, sharpness: float = 1.0
) -> Sampled:
    """Return what `sample_tokens` returns, by the passes that the module describes; never synchronises."""
    num_rows, vocab = logits.shape
    t, device = tables, logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    has_nan = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return Sampled(token_ids, has_nan)
    if wanted.rules:
        apply_logit_bias(logits, rows.row_slots, t.bias_ids, t.bias_values, t.num_biases)
        _touch(logits, rows, t)
    filters = wanted.filters or wanted.min_p
    keep = wanted.keep or wanted.typical_p
    stats = RowStats.empty(num_rows if filters else 0, vocab, device)
    num_blocks, num_subs = stats.sums.shape[1], stats.tops.shape[1]
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    best_id = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    block_nan = torch.empty((num_rows, num_blocks), dtype=torch.int8, device=device)
    of_row, grid = (logits, logits.stride(0)), (num_rows, num_blocks)
    limits = (t.top_k, t.top_p, t.min_p_reach)
    _first_pass_kernel[grid](
        best,
        best_id,
        block_nan,
        *stats,
        *of_row,
        rows.row_slots,
        rows.positions,
        rows.spec_ids,
        rows.spec_start,
        rows.spec_count,
        t.seeds,
        t.temperature,
        *limits,
        t.repetition_penalty,
        t.frequency_penalty,
        t.presence_penalty,
        t.prompt_mask,
        t.prompt_mask.stride(0),
        t.output_counts,
        t.output_counts.stride(0),
        t.allowed_mask,
        t.allowed_mask.stride(0),
        t.num_allowed,
        t.end_mask,
        t.end_mask.stride(0),
        t.first_end,
        sharpness,
        vocab,
        num_subs,
        RULES=wanted.rules,
        PENALTIES=wanted.penalties,
        NOISE=wanted.noise,
        FILTERS=filters,
        KEEP=keep,
        BLOCK=BLOCK,
        SUB=SUB,
        **_OPTIONS,
    )
    if filters:
        threshold = row_thresholds(stats, logits, rows.row_slots, *limits)
        _second_pass_kernel[grid](
            best,
            best_id,
            threshold,
            stats.tops,
            *of_row,
            rows.row_slots,
            rows.positions,
            t.seeds,
            t.temperature,
            *limits,
            sharpness,
            vocab,
            num_subs,
            KEEP=keep,
            BLOCK=BLOCK,
            SUB=SUB,
            **_OPTIONS,
        )
    _join_kernel[(num_rows,)](
        token_ids,
        has_nan,
        best,
        best_id,
        block_nan,
        rows.row_slots,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    if wanted.typical_p:
        apply_typical_p(logits, rows.row_slots, t.typical_p)
        token_ids = gumbel_sample_triton(logits, rows.row_slots, rows.positions, t.seeds, t.temperature, sharpness)
    return Sampled(token_ids, has_nan)
