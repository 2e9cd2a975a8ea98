"""From logits to tokens in as few passes over the vocabulary as the rows need: every processor, and the draw.

Knows the order of the processors (`specgen.worker.sampler` says it) and the per-slot tables that they read. The twin
calls the processors one by one, each the twin of its own file. On the device,

    touch    logit_bias, n-grams and bad words: a few tokens a row, in place
    look     rows with a filter: a floor for what the filters leave (`_filter_rows.py`)
    pass     one read of the logits, in parts: allowed ids, least length, penalties and temperature. A row without
             filters is drawn from there; of a row with filters, the columns from the floor on are collected
    finish   draws the rows with filters from what was collected
    remove   where the logits are kept: -inf for what the filters remove
    join     the best of a row's parts

Processed logits are only written where they are kept: the pass works with rough ones, and whoever needs a few exact
ones makes them from the raw logits again (`_processed.py`).

What only sets -inf may come in any order before the filters, since nothing turns -inf into anything else.

A draft layer's vocabulary may be cut: its logits then have a column for each of the lowest ids, and for a few others.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._draw import BLOCK, DRAW_OPTIONS, LANES, draw_grid
from specgen.kernels._filter_rows import Collected, finish, look
from specgen.kernels._processed import RowTables
from specgen.kernels._token_pass import _join_kernel, _pass_kernel, _remove_kernel
from specgen.kernels._triton import triton
from specgen.kernels.allowed_ids import apply_allowed_ids
from specgen.kernels.bad_words import apply_bad_words
from specgen.kernels.gumbel import gumbel_sample
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


def expand_logits(logits: torch.Tensor, extra_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits of a cut vocabulary, `[N, C]`, as `[N, vocab_size]`: those of the other tokens are -inf.

    The last columns are the tokens `extra_ids [E] int32`, the others those of their own numbers.
    """
    num_lowest = logits.shape[1] - extra_ids.shape[0]
    out = torch.full((logits.shape[0], vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
    out[:, :num_lowest] = logits[:, :num_lowest]
    out[:, extra_ids.long()] = logits[:, num_lowest:]
    return out


class Sampled(NamedTuple):
    """`token_ids [N] int64`, and whether each row's logits held a NaN, `[N] bool`."""

    token_ids: torch.Tensor
    has_nan: torch.Tensor


def sample_tokens(
    logits: torch.Tensor,
    rows: LogitsRows,
    tables: SamplingTables,
    wanted: Wanted,
    sharpness: float = 1.0,
    extra_ids: torch.Tensor | None = None,
) -> Sampled:
    """Return the token of each row of `logits [N, V] float32`, which are overwritten; 0 for a padded row.

    `sharpness`: what processed logits are multiplied with in the draw. With `extra_ids [E] int32`, rising, the
    vocabulary is cut: `logits [N, C]`, whose last E columns are these tokens, each at least C - E, and the others those
    of their own numbers; rules can't be wanted. Without it, `logits` may have fewer columns than the tables, too.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_rows, num_columns = logits.shape
    check("logits", logits, torch.float32, num_rows, None)
    for name in ("row_slots", "spec_start", "spec_count"):
        check(name, getattr(rows, name), torch.int32, num_rows)
    check("positions", rows.positions, torch.int64, num_rows)
    check("output_counts", tables.output_counts, torch.int32, None, None)
    check_same_device(logits=logits, row_slots=rows.row_slots, temperature=tables.temperature)
    vocab_size = tables.output_counts.shape[1]
    if num_columns > vocab_size:
        raise ValueError(f"logits: expected at most {vocab_size} columns, as output_counts has, got {num_columns}")
    if extra_ids is not None:
        check("extra_ids", extra_ids, torch.int32, None)
        check_same_device(logits=logits, extra_ids=extra_ids)
    if wanted.rules and (extra_ids is not None or num_columns < vocab_size):
        raise ValueError("rules act on whole vocabularies: expand_logits before")
    if extra_ids is None and num_columns < vocab_size:
        extra_ids = torch.empty(0, dtype=torch.int32, device=logits.device)
    op = sample_tokens_triton if logits.is_cuda else sample_tokens_torch
    return op(logits, rows, tables, wanted, sharpness, extra_ids)


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
    logits: torch.Tensor,
    rows: LogitsRows,
    tables: SamplingTables,
    wanted: Wanted,
    sharpness: float = 1.0,
    extra_ids: torch.Tensor | None = None,
) -> Sampled:
    """Return what `sample_tokens` returns, by the processors one after another."""
    if extra_ids is not None:
        whole = expand_logits(logits, extra_ids, tables.output_counts.shape[1])
        sampled = sample_tokens_torch(whole, rows, tables, wanted, sharpness)
        if wanted.keep:
            num_lowest = logits.shape[1] - extra_ids.shape[0]
            logits[:, :num_lowest] = whole[:, :num_lowest]
            logits[:, num_lowest:] = whole[:, extra_ids.long()]
        return sampled
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


def _row_tables(logits: torch.Tensor, rows: LogitsRows, t: SamplingTables, extra_ids: torch.Tensor | None) -> RowTables:
    strided = {
        f"{name}_stride": getattr(t, name).stride(0)
        for name in ("prompt_mask", "output_counts", "allowed_mask", "end_mask")
    }
    values = {**rows._asdict(), **t._asdict(), **strided}
    values |= {"logits": logits, "logits_stride": logits.stride(0), "num_columns": logits.shape[1]}
    values |= {"extra_ids": rows.row_slots, "num_extra": 0}  # not read
    if extra_ids is not None:
        values |= {"extra_ids": extra_ids, "num_extra": extra_ids.shape[0]}
    return RowTables(**{name: values[name] for name in RowTables._fields})


def sample_tokens_triton(
    logits: torch.Tensor,
    rows: LogitsRows,
    tables: SamplingTables,
    wanted: Wanted,
    sharpness: float = 1.0,
    extra_ids: torch.Tensor | None = None,
) -> Sampled:
    """Return what `sample_tokens` returns, by the passes that the module describes; never synchronises."""
    num_rows, num_columns = logits.shape
    t, device = tables, logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    has_nan = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return Sampled(token_ids, has_nan)
    if wanted.rules:
        apply_logit_bias(logits, rows.row_slots, t.bias_ids, t.bias_values, t.num_biases)
        _touch(logits, rows, t)
    filters = wanted.filters or wanted.min_p or wanted.typical_p
    has_extra = extra_ids is not None and extra_ids.shape[0] > 0
    flags = {"RULES": wanted.rules, "PENALTIES": wanted.penalties, "NOISE": wanted.noise, "HAS_EXTRA": has_extra}
    num_parts, span = draw_grid(num_rows, num_columns)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    best_id = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    part_nan = torch.empty((num_rows, num_parts), dtype=torch.int8, device=device)
    on_device = _row_tables(logits, rows, t, extra_ids)
    collected = Collected.empty(0, device)
    if filters:
        flags_of_filters = {**flags, "TYPICAL": wanted.typical_p}
        collected = look(on_device, num_rows, flags_of_filters, wanted.filters or wanted.typical_p)
    _pass_kernel[(num_rows, num_parts)](
        best,
        best_id,
        part_nan,
        collected.columns,
        collected.count,
        collected.floor,
        on_device,
        sharpness,
        span,
        **flags,
        FILTERS=filters,
        KEEP=wanted.keep,
        LANES=LANES,
        BLOCK=BLOCK // 2 if wanted.rules or wanted.penalties or has_extra else BLOCK,  # they take registers
        MAX_COLLECTED=collected.columns.shape[1],
        **DRAW_OPTIONS,
    )
    if filters:
        finish(best, best_id, collected, on_device, flags_of_filters, wanted.keep, sharpness)
    if filters and wanted.keep:
        _remove_kernel[(num_rows, triton.cdiv(num_columns, _REMOVED))](
            collected.threshold, collected.typical, on_device, TYPICAL=wanted.typical_p, BLOCK=_REMOVED
        )
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
    return Sampled(token_ids, has_nan)
