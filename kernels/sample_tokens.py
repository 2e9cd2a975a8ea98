"""From logits to tokens in as few passes over the vocabulary as the rows need: every processor, and the draw.

Knows the order of the processors (`specgen.worker.sampler` says it) and the per-slot tables that they read. The twin
calls the processors one by one, each the twin of its own file. On the device,

    touch    logit_bias, n-grams and bad words: a few tokens a row, in place
    look     rows with a filter: a floor for what the filters leave (`_filter_rows.py`)
    pass     one read of the logits, in parts: allowed ids, least length, penalties and temperature. A row without
             filters is drawn from there; of a row with filters, the ids from the floor on are collected
    finish   draws the rows with filters from what was collected
    join     the best of a row's parts

Processed logits are only written where they are kept: the pass works with rough ones, and whoever needs a few exact
ones makes them from the raw logits again (`_processed.py`).

What only sets -inf may come in any order before the filters, since nothing turns -inf into anything else.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._filter_rows import Collected, _collect, finish, look
from specgen.kernels._processed import RowTables, _processed, _row_terms, _undivided
from specgen.kernels._row_thresholds import _limits
from specgen.kernels._triton import tl, triton
from specgen.kernels.allowed_ids import apply_allowed_ids
from specgen.kernels.bad_words import apply_bad_words
from specgen.kernels.gumbel import (
    BLOCK,
    DRAW_OPTIONS,
    LANES,
    _any,
    _draw,
    _load_block,
    _marks,
    _places,
    _row_best,
    _store_block,
    draw_grid,
    gumbel_sample,
    gumbel_sample_triton,
)
from specgen.kernels.logit_bias import apply_logit_bias
from specgen.kernels.min_p import apply_min_p
from specgen.kernels.min_tokens import apply_min_tokens
from specgen.kernels.nan_rows import nan_rows
from specgen.kernels.no_repeat_ngram import apply_no_repeat_ngram
from specgen.kernels.penalties import apply_penalties
from specgen.kernels.temperature import apply_temperature
from specgen.kernels.top_k_top_p import apply_top_k_top_p
from specgen.kernels.typical_p import apply_typical_p

_REMOVED = 4096  # logits of a program


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


# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _pass_kernel(
    best_ptr,
    best_id_ptr,
    has_nan_ptr,
    ids_ptr,
    count_ptr,
    floor_ptr,
    t,
    sharpness,
    span,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    FILTERS: tl.constexpr,
    KEEP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    if slot < 0:
        return
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    scale = 1.0 / terms[8]
    is_random = slot < 0
    if NOISE:
        is_random = tl.load(t.temperature + slot) > 0.0
    is_filtered = slot < 0
    floor = tl.full([], float("-inf"), tl.float32)
    if FILTERS:
        _k, _p, _reach, is_filtered = _limits(t, slot)
        floor = tl.load(floor_ptr + row, mask=is_filtered, other=0.0)
        floor = floor - 1e-6 * tl.minimum(tl.abs(floor), 1e30) - 1e-30  # rough logits are a little off
    if KEEP:
        scale = tl.full([], 1.0, tl.float32)
    row_ptr = t.logits + row * t.logits_stride
    args = (t, row, slot, terms, RULES, PENALTIES, KEEP)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    odd = tl.zeros([], tl.int32)
    for start in range(part * span, tl.minimum((part + 1) * span, t.vocab_size), BLOCK):
        logits = _load_block(row_ptr, start, t.vocab_size, float("-inf"), LANES, BLOCK)
        _quad, _of_four, own = _places(start, LANES, BLOCK)
        raw = logits
        logits = _undivided(logits, start, t, slot, terms, KEEP, RULES, PENALTIES, LANES, BLOCK)
        suspect = tl.sum(tl.sum(raw * 0.0, axis=2), axis=0)  # NaN from NaN and infinities
        if _any((suspect != suspect).to(tl.int32)):
            odd = tl.maximum(odd, tl.max(tl.max(tl.max((raw != raw).to(tl.int32), axis=2), axis=0), axis=0))
        if KEEP:
            logits = tl.div_rn(logits, terms[8])
            _store_block(row_ptr, logits, start, t.vocab_size, LANES, BLOCK)
            tl.debug_barrier()  # single ones are read again
        if is_filtered:
            marks = _marks((logits * scale >= floor) & (logits > float("-inf")), own)
            _collect(ids_ptr + row * MAX_COLLECTED, count_ptr + row, marks, start, LANES, MAX_COLLECTED)
        else:
            best, best_id = _draw(
                best,
                best_id,
                logits,
                scale,
                start,
                seed,
                position,
                is_random,
                sharpness,
                _processed,
                args,
                LANES,
                BLOCK,
            )
    out = row * tl.num_programs(1) + part
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, best_id)
    tl.store(has_nan_ptr + out, odd.to(tl.int8))


@triton.jit
def _remove_kernel(threshold_ptr, t, BLOCK: tl.constexpr):
    """What the filters remove becomes -inf."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    _k, _p, _reach, is_filtered = _limits(t, slot)
    if is_filtered == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < t.vocab_size
    at = t.logits + row * t.logits_stride + token
    removed = (tl.load(at, mask=inside, other=0.0) >= tl.load(threshold_ptr + row)) == 0  # true for NaN
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & removed)


@triton.jit
def _join_kernel(
    out_ptr, has_nan_ptr, best_ptr, best_id_ptr, part_nan_ptr, row_slots_ptr, num_parts, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_slots_ptr + row) < 0:
        tl.store(out_ptr + row, 0)
        tl.store(has_nan_ptr + row, False)
        return
    tl.store(out_ptr + row, _row_best(best_ptr, best_id_ptr, row, num_parts, PARTS))
    part = tl.arange(0, PARTS)
    odd = tl.load(part_nan_ptr + row * num_parts + part, mask=part < num_parts, other=0)
    tl.store(has_nan_ptr + row, tl.max(odd.to(tl.int32), axis=0) > 0)


def _row_tables(logits: torch.Tensor, rows: LogitsRows, t: SamplingTables) -> RowTables:
    strided = {
        f"{name}_stride": getattr(t, name).stride(0)
        for name in ("prompt_mask", "output_counts", "allowed_mask", "end_mask")
    }
    values = {**rows._asdict(), **t._asdict(), **strided}
    values |= {"logits": logits, "logits_stride": logits.stride(0), "vocab_size": logits.shape[1]}
    return RowTables(**{name: values[name] for name in RowTables._fields})


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
    flags = {"RULES": wanted.rules, "PENALTIES": wanted.penalties, "NOISE": wanted.noise}
    num_parts, span = draw_grid(num_rows, vocab)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    best_id = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    part_nan = torch.empty((num_rows, num_parts), dtype=torch.int8, device=device)
    collected = Collected.empty(num_rows if filters else 0, device)
    on_device = _row_tables(logits, rows, t)
    if filters:
        look(collected, on_device, flags, wanted.filters)
    _pass_kernel[(num_rows, num_parts)](
        best,
        best_id,
        part_nan,
        collected.ids,
        collected.count,
        collected.floor,
        on_device,
        sharpness,
        span,
        **flags,
        FILTERS=filters,
        KEEP=keep,
        LANES=LANES,
        BLOCK=BLOCK // 2 if wanted.rules or wanted.penalties else BLOCK,  # they take registers
        MAX_COLLECTED=collected.ids.shape[1],
        **DRAW_OPTIONS,
    )
    if filters:
        finish(best, best_id, collected, on_device, flags, keep, sharpness)
    if filters and keep:
        _remove_kernel[(num_rows, triton.cdiv(vocab, _REMOVED))](collected.threshold, on_device, BLOCK=_REMOVED)
    _join_kernel[(num_rows,)](
        token_ids,
        has_nan,
        best,
        best_id,
        part_nan,
        rows.row_slots,
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    if wanted.typical_p:
        apply_typical_p(logits, rows.row_slots, t.typical_p)
        token_ids = gumbel_sample_triton(logits, rows.row_slots, rows.positions, t.seeds, t.temperature, sharpness)
    return Sampled(token_ids, has_nan)
