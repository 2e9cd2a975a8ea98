"""Processed logits on the device, of a block of tokens or of single ones: what a row's tokens are drawn from.

Knows: the tables of `sample_tokens.py` and a row's raw logits. Allowed ids, least length, penalties and temperature are
a function of one token's logit, so whoever wants a few processed logits makes them anew instead of reading stored ones.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch

from specgen.kernels._triton import tl, triton
from specgen.kernels.gumbel import _load_block, _places


class RowTables(NamedTuple):
    """What the kernels read: the fields of `LogitsRows` and `SamplingTables` by their names, strides in elements."""

    logits: torch.Tensor
    logits_stride: int
    vocab_size: int
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


# In what follows, `at` is the first id of a block of BLOCK logits, which are shaped like its places (see `gumbel.py`),
# or with BLOCK 0 the ids of single logits.


@triton.jit
def _bits(mask_ptr, at, vocab_size, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Bit v % 32 of word v // 32 for each id; the four neighbours of a lane are in one word."""
    if BLOCK:
        quad = at + tl.arange(0, BLOCK // 4) * 4
        word = tl.load(mask_ptr + quad // 32, mask=quad < vocab_size, other=0)
        word = tl.reshape(word, [BLOCK // 4 // LANES, LANES, 1])
        place = (tl.arange(0, LANES) * 4 % 32)[None, :, None] + tl.arange(0, 4)[None, None, :]
    else:
        word = tl.load(mask_ptr + at // 32)
        place = at % 32
    return ((word >> place) & 1) != 0


@triton.jit
def _penalised(logits, at, t, slot, terms, EXACT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    _listed, _short, _penalised, repetition, frequency, presence, spec_start, spec_count, _divisor = terms
    counts_ptr = t.output_counts + slot * t.output_counts_stride
    seen = _bits(t.prompt_mask + slot * t.prompt_mask_stride, at, t.vocab_size, LANES, BLOCK)
    if BLOCK:
        count = _load_block(counts_ptr, at, t.vocab_size, 0, LANES, BLOCK)
        quad, of_four, _own = _places(at, LANES, BLOCK)
        token = quad + of_four
    else:
        count = tl.load(counts_ptr + at)
        token = at
    for i in range(spec_count):
        count += (token == tl.load(t.spec_ids + spec_start.to(tl.int64) + i).to(tl.int32)).to(tl.int32)
    if EXACT:
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    else:
        repeated = logits * tl.where(logits > 0, 1.0 / repetition, repetition)
    value = tl.where(seen | (count > 0), repeated, logits)
    value = value - frequency * count.to(tl.float32)
    return value - tl.where(count > 0, presence, 0.0)


@triton.jit
def _undivided(
    logits,
    at,
    t,
    slot,
    terms,
    EXACT: tl.constexpr,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What raw `logits` become before the division by the temperature; up to a rounding or two unless EXACT."""
    is_listed, is_short, is_penalised, _r, _f, _p, _start, _count, _divisor = terms
    if RULES:
        if is_listed:
            allowed = _bits(t.allowed_mask + slot * t.allowed_mask_stride, at, t.vocab_size, LANES, BLOCK)
            logits = tl.where(allowed, logits, float("-inf"))
        if is_short:
            ends = _bits(t.end_mask + slot * t.end_mask_stride, at, t.vocab_size, LANES, BLOCK)
            logits = tl.where(ends, float("-inf"), logits)
    if PENALTIES:  # noqa: SIM102 - decided when the kernel is compiled
        if is_penalised:
            logits = _penalised(logits, at, t, slot, terms, EXACT, LANES, BLOCK)
    return logits


@triton.jit
def _processed(token, mask, args):
    """The processed logits of single tokens, as the twins give them; -inf outside `mask` and the vocabulary.

    args: (tables, row, slot, terms, RULES, PENALTIES, STORED); STORED: they are in place of the raw ones.
    """
    t, row, slot, terms, RULES, PENALTIES, STORED = args
    inside = mask & (token < t.vocab_size)
    logits = tl.load(t.logits + row * t.logits_stride + token, mask=inside, other=float("-inf"))
    if not STORED:
        token = tl.where(inside, token, 0)
        logits = tl.div_rn(_undivided(logits, token, t, slot, terms, True, RULES, PENALTIES, 0, 0), terms[8])
        logits = tl.where(inside, logits, float("-inf"))
    return logits
