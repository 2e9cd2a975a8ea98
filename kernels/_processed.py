"""Processed logits on the device, of a block of columns or of single ones: what a row's tokens are drawn from.

Knows: the tables of `sample_tokens.py` and a row's raw logits. Allowed ids, least length, penalties and temperature are
a function of one token's logit, so whoever wants a few processed logits makes them anew instead of reading stored ones.

A column of the logits is the token of that id, but for the last few where a draft's vocabulary is cut (HAS_EXTRA):

    column   0 .. n - 1   n      n + 1   ..
    token    0 .. n - 1   extra_ids[0]   ..      n or more, rising: ids are in the order of columns
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch

from specgen.kernels._draw import _load_block, _places
from specgen.kernels._triton import tl, triton


class RowTables(NamedTuple):
    """What the kernels read: the fields of `LogitsRows` and `SamplingTables` by their names, strides in elements.

    num_columns: of `logits`; the last num_extra are `extra_ids`, int32.
    """

    logits: torch.Tensor
    logits_stride: int
    num_columns: int
    extra_ids: torch.Tensor
    num_extra: int
    row_slots: torch.Tensor
    positions: torch.Tensor
    spec_ids: torch.Tensor
    spec_start: torch.Tensor
    spec_count: torch.Tensor
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
    prompt_mask_stride: int
    output_counts: torch.Tensor
    output_counts_stride: int
    allowed_mask: torch.Tensor
    allowed_mask_stride: int
    num_allowed: torch.Tensor
    end_mask: torch.Tensor
    end_mask_stride: int
    first_end: torch.Tensor


@triton.jit
def _row_terms(t, row, slot, RULES: tl.constexpr, PENALTIES: tl.constexpr, NOISE: tl.constexpr):
    """What a row's logits are processed with: (has a list of allowed ids, may not end yet, has penalties, repetition,
    frequency and presence penalty, where its drafts begin, how many they are, divisor)."""
    is_listed = slot < 0
    is_short = slot < 0
    if RULES:
        is_listed = tl.load(t.num_allowed + slot) > 0
        is_short = tl.load(t.positions + row) + 1 < tl.load(t.first_end + slot)
    repetition = tl.full([], 1.0, tl.float32)
    frequency = tl.full([], 0.0, tl.float32)
    presence = tl.full([], 0.0, tl.float32)
    spec_start = tl.full([], 0, tl.int32)
    spec_count = tl.full([], 0, tl.int32)
    if PENALTIES:
        repetition = tl.load(t.repetition_penalty + slot)
        frequency = tl.load(t.frequency_penalty + slot)
        presence = tl.load(t.presence_penalty + slot)
        spec_start = tl.load(t.spec_start + row)
        spec_count = tl.load(t.spec_count + row)
    divisor = tl.full([], 1.0, tl.float32)  # x / 1 is x, bit by bit
    if NOISE:
        temperature = tl.load(t.temperature + slot)
        divisor = tl.where(temperature > 0.0, temperature, 1.0)
    is_penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    return is_listed, is_short, is_penalised, repetition, frequency, presence, spec_start, spec_count, divisor


@triton.jit
def _quotient(logits, divisor, scale):
    """`logits / divisor`, rounded as a division is, given scale = 1 / divisor: a product, and what it lacks."""
    quotient = logits * scale
    nearer = tl.fma(tl.fma(-quotient, divisor, logits), scale, quotient)
    return tl.where(nearer == nearer, nearer, quotient)  # infinities have no rest


@triton.jit
def _tokens(column, t, HAS_EXTRA: tl.constexpr):
    """The ids of columns; 0 for those behind the last one, if a vocabulary is cut."""
    if HAS_EXTRA:
        nth = column - (t.num_columns - t.num_extra)
        extra = tl.load(t.extra_ids + nth, mask=(nth >= 0) & (nth < t.num_extra), other=0)
        column = tl.where(nth < 0, column, extra)
    return column


@triton.jit
def _block_tokens(start, t, HAS_EXTRA: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The ids of a block of columns that begins at `start`, shaped like its places (see `_draw.py`); as `_tokens`, but
    for the way in which the few others are read: four neighbours a lane, as the logits are."""
    quad, of_four, _own = _places(start, LANES, BLOCK)
    token = quad + of_four
    if HAS_EXTRA:
        num_lowest = t.num_columns - t.num_extra
        if start + BLOCK > num_lowest:
            nth = start - num_lowest + tl.arange(0, BLOCK // 4 // LANES)[:, None] * (4 * LANES)
            nth = nth + tl.arange(0, 4 * LANES)[None, :]
            extra = tl.load(t.extra_ids + nth, mask=(nth >= 0) & (nth < t.num_extra), other=0)
            extra = tl.reshape(extra, [BLOCK // 4 // LANES, LANES, 4])
            token = tl.where(token < num_lowest, token, extra)
    return token


# In what follows, `token` are the ids of a block of BLOCK columns that begins at `start`, shaped like its places, or
# with BLOCK 0 those of single columns.


@triton.jit
def _bits(mask_ptr, start, token, t, HAS_EXTRA: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Bit v % 32 of word v // 32 for each id; the four neighbours of a lane are in one word."""
    if (BLOCK > 0) and not HAS_EXTRA:
        quad = start + tl.arange(0, BLOCK // 4) * 4
        word = tl.load(mask_ptr + quad // 32, mask=quad < t.num_columns, other=0)
        word = tl.reshape(word, [BLOCK // 4 // LANES, LANES, 1])
        place = (tl.arange(0, LANES) * 4 % 32)[None, :, None] + tl.arange(0, 4)[None, None, :]
    else:
        word = tl.load(mask_ptr + token // 32)
        place = token % 32
    return ((word >> place) & 1) != 0


@triton.jit
def _penalised(
    logits,
    start,
    token,
    t,
    slot,
    terms,
    EXACT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _listed, _short, _penalised, repetition, frequency, presence, spec_start, spec_count, _divisor = terms
    counts_ptr = t.output_counts + slot * t.output_counts_stride
    seen = _bits(t.prompt_mask + slot * t.prompt_mask_stride, start, token, t, HAS_EXTRA, LANES, BLOCK)
    if (BLOCK > 0) and not HAS_EXTRA:
        count = _load_block(counts_ptr, start, t.num_columns, 0, LANES, BLOCK)
    else:
        count = tl.load(counts_ptr + token)
    for i in range(spec_count):
        count += (token == tl.load(t.spec_ids + spec_start.to(tl.int64) + i).to(tl.int32)).to(tl.int32)
    if EXACT:
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    else:
        repeated = tl.where(logits > 0, _quotient(logits, repetition, 1.0 / repetition), logits * repetition)
    value = tl.where(seen | (count > 0), repeated, logits)
    value = value - frequency * count.to(tl.float32)
    return value - tl.where(count > 0, presence, 0.0)


@triton.jit
def _undivided(
    logits,
    start,
    token,
    t,
    slot,
    terms,
    EXACT: tl.constexpr,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What raw `logits` become before the division by the temperature; EXACT: for the largest and smallest, too."""
    is_listed, is_short, is_penalised, _r, _f, _p, _start, _count, _divisor = terms
    if RULES:
        if is_listed:
            mask_ptr = t.allowed_mask + slot * t.allowed_mask_stride
            logits = tl.where(_bits(mask_ptr, start, token, t, HAS_EXTRA, LANES, BLOCK), logits, float("-inf"))
        if is_short:
            mask_ptr = t.end_mask + slot * t.end_mask_stride
            logits = tl.where(_bits(mask_ptr, start, token, t, HAS_EXTRA, LANES, BLOCK), float("-inf"), logits)
    if PENALTIES:  # noqa: SIM102 - decided when the kernel is compiled
        if is_penalised:
            logits = _penalised(logits, start, token, t, slot, terms, EXACT, HAS_EXTRA, LANES, BLOCK)
    return logits


@triton.jit
def _processed(column, mask, args):
    """The processed logits of single columns, as the twins give them, and their tokens; -inf outside `mask`.

    args: (tables, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, STORED); STORED: they are in place of the raw ones.
    """
    t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, STORED = args
    logits = tl.load(t.logits + row * t.logits_stride + column, mask=mask, other=float("-inf"))
    token = _tokens(tl.where(mask, column, 0), t, HAS_EXTRA)
    if not STORED:
        logits = _undivided(logits, 0, token, t, slot, terms, True, RULES, PENALTIES, HAS_EXTRA, 0, 0)
        logits = tl.where(mask, tl.div_rn(logits, terms[8]), float("-inf"))
    return logits, token
