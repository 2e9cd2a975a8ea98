"""Searches whole rows, and draws from them: those of which more is left than can be collected.

Knows: processed logits, a row's limits, noise (`_draw.py`). A row is quartered by rank: each read of it tells in which
quarter of what was left the threshold is, until few enough logits are left to look at them one by one. Sums are of
integers: a row that is searched gets the threshold that it would get from what was collected.
"""

# mypy: ignore-errors

import torch

from specgen.kernels._draw import _draw, _load_block
from specgen.kernels._processed import RowTables, _block_tokens, _processed, _row_terms
from specgen.kernels._row_thresholds import (
    _clean,
    _is_kept,
    _is_typical_alone,
    _key,
    _limits,
    _rank,
    _smallest_kept,
    _sums_from,
    _value,
    _weight,
)
from specgen.kernels._triton import tl, triton

_BLOCK, _WARPS = 2048, 16  # of a row, at a time
_PIECE = 1024


@triton.jit
def _quarters(
    row_ptr, length, least, low, high, top, mean, BY_MASS: tl.constexpr, TYPICAL: tl.constexpr, BLOCK: tl.constexpr
):
    """For the range of ranks (low, high] from each of its quarters on: how many logits, and their sum."""
    at = tl.arange(0, BLOCK)
    quarter = high * 0.25 - low * 0.25
    first = low + quarter
    second = low + quarter * 2.0
    third = low + quarter * 3.0
    counts_0 = tl.zeros([BLOCK], tl.int32)
    counts_1 = tl.zeros([BLOCK], tl.int32)
    counts_2 = tl.zeros([BLOCK], tl.int32)
    counts_3 = tl.zeros([BLOCK], tl.int32)
    sums_0 = tl.zeros([BLOCK], tl.int64)
    sums_1 = tl.zeros([BLOCK], tl.int64)
    sums_2 = tl.zeros([BLOCK], tl.int64)
    sums_3 = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, length, BLOCK, num_stages=3):
        logits = _clean(tl.load(row_ptr + start + at, mask=at < length - start, other=float("-inf")))
        ranks = _rank(logits, least, top, mean, TYPICAL)
        inside = (ranks > low) & (ranks <= high)
        counts_0 += inside.to(tl.int32)
        counts_1 += (inside & (ranks > first)).to(tl.int32)
        counts_2 += (inside & (ranks > second)).to(tl.int32)
        counts_3 += (inside & (ranks > third)).to(tl.int32)
        if BY_MASS:
            units = tl.where(inside, _weight(logits, top), 0)
            sums_0 += units
            sums_1 += tl.where(ranks > first, units, 0)
            sums_2 += tl.where(ranks > second, units, 0)
            sums_3 += tl.where(ranks > third, units, 0)
    num_0 = tl.sum(counts_0, axis=0)
    num_1 = tl.sum(counts_1, axis=0)
    num_2 = tl.sum(counts_2, axis=0)
    num_3 = tl.sum(counts_3, axis=0)
    if BY_MASS:
        sum_0 = tl.sum(sums_0, axis=0).to(tl.float64)
        sum_1 = tl.sum(sums_1, axis=0).to(tl.float64)
        sum_2 = tl.sum(sums_2, axis=0).to(tl.float64)
        sum_3 = tl.sum(sums_3, axis=0).to(tl.float64)
    else:
        sum_0 = num_0.to(tl.float64)
        sum_1 = num_1.to(tl.float64)
        sum_2 = num_2.to(tl.float64)
        sum_3 = num_3.to(tl.float64)
    return first, second, third, num_0, num_1, num_2, num_3, sum_0, sum_1, sum_2, sum_3


@triton.jit
def _take(
    scratch_ptr, row_ptr, length, least, low, high, top, mean, TYPICAL: tl.constexpr, MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's logits with ranks in (low, high], at most MAX, to `scratch_ptr`; how many they are."""
    at = tl.arange(0, BLOCK)
    offset = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, length, BLOCK):
        logits = _clean(tl.load(row_ptr + start + at, mask=at < length - start, other=float("-inf")))
        ranks = _rank(logits, least, top, mean, TYPICAL)
        chosen = ((ranks > low) & (ranks <= high)).to(tl.int32)
        count = tl.sum(chosen, axis=0)
        if count > 0:
            place = offset + tl.cumsum(chosen, axis=0) - 1
            tl.store(scratch_ptr + place, logits, mask=(chosen != 0) & (place < MAX))
            offset += count
    tl.debug_barrier()
    return offset


@triton.jit
def _search_row(
    row_ptr,
    scratch_ptr,
    length,
    least,
    low,
    high,
    wanted,
    top,
    mean,
    BY_MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """What `_smallest_kept` finds in a row whose ranks are at most `high`; `low` if the sum above is too small."""
    length = tl.full([], 0, tl.int32) + length
    left = length
    above = tl.full([], 0, tl.float64)
    reached = left > 0
    rounds = tl.full([], 0, tl.int32)
    while (rounds == 0) | ((left > MAX_COLLECTED) & (rounds < 12)):
        first, second, third, num_0, num_1, num_2, num_3, sum_0, sum_1, sum_2, sum_3 = _quarters(
            row_ptr, length, least, low, high, top, mean, BY_MASS, TYPICAL, BLOCK
        )
        in_3 = above + sum_3 >= wanted
        in_2 = above + sum_2 >= wanted
        in_1 = above + sum_1 >= wanted
        reached = above + sum_0 >= wanted
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
        high = tl.where(in_3, high, tl.where(in_2, third, tl.where(in_1, second, first)))
        left = tl.where(in_3, num_3, tl.where(in_2, num_2 - num_3, tl.where(in_1, num_1 - num_2, num_0 - num_1)))
        left = tl.where(reached, left, 0)
        above += tl.where(in_3, 0.0, tl.where(in_2, sum_3, tl.where(in_1, sum_2, sum_1)))
        rounds += 1
    source = row_ptr
    if reached & (left <= MAX_COLLECTED):
        length = _take(scratch_ptr, row_ptr, length, least, low, high, top, mean, TYPICAL, MAX_COLLECTED, BLOCK)
        source = scratch_ptr
    high = tl.where(reached, high, low)
    return _smallest_kept(source, length, least, low, high, wanted, above, top, mean, BY_MASS, TYPICAL, PIECE)


@triton.jit
def _process_row(args, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Put a row's processed logits in place of the raw ones; the largest and the smallest finite one, clean."""
    t, row, _slot, _terms, _rules, _penalties, _has_extra, _stored = args
    at = tl.arange(0, BLOCK)
    row_ptr = t.logits + row * t.logits_stride
    tops = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    bottoms = tl.full([BLOCK], 3.4028234663852886e38, tl.float32)
    for start in range(0, t.num_columns, BLOCK):
        inside = start + at < t.num_columns
        logits, _token = _processed(start + at, inside, args)
        if not STORED:
            tl.store(row_ptr + start + at, logits, mask=inside)
        logits = _clean(logits)
        tops = tl.maximum(tops, logits)
        bottoms = tl.minimum(bottoms, tl.where(logits > float("-inf"), logits, 3.4028234663852886e38))
    tl.debug_barrier()
    top = tl.max(tops, axis=0)
    return top, tl.minimum(tl.min(bottoms, axis=0), top)


@triton.jit
def _threshold_in(
    row_ptr, scratch_ptr, length, top, bottom, mass, limits, MAX_COLLECTED: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The smallest logit of a row that top-k, top-p and min-p leave."""
    k, p, reach, _typical, _is_on = limits
    threshold = bottom
    if k > 0:
        threshold = _search_row(
            row_ptr, scratch_ptr, length, bottom, bottom, top, k.to(tl.float64), top, top, False, False,
            MAX_COLLECTED, BLOCK, PIECE,
        )  # fmt: skip
    if p < 1.0:
        held, _moments = _sums_from(row_ptr, length, threshold, top, BLOCK)
        wanted = tl.minimum(tl.maximum(p.to(tl.float64) * tl.where(k == 0, mass, held), 1e-9), held)
        # what is further down weighs nothing; strictly below `top`, however large that is
        low = tl.minimum(top - 31.0, _value(_key(top) - 1))
        threshold = _search_row(
            row_ptr, scratch_ptr, length, threshold, low, top, wanted, top, top, True, False,
            MAX_COLLECTED, BLOCK, PIECE,
        )  # fmt: skip
    return tl.maximum(threshold, top - reach)


@triton.jit
def _typical_in(
    row_ptr, scratch_ptr, length, threshold, top, mass, mean, limits, MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """How typical-p cuts what is left of a row from `threshold` on: the mean distance from the top, and how far from
    it a kept one may be."""
    typical = limits[3]
    last = tl.full([], float("inf"), tl.float32)
    if typical < 1.0:
        held, moments = _sums_from(row_ptr, length, threshold, top, BLOCK)
        is_alone = _is_typical_alone(limits)
        mean = tl.where(is_alone, mean, (moments / held).to(tl.float32))
        wanted = tl.maximum(typical.to(tl.float64) * tl.where(is_alone, mass, held), 1e-9)
        low = tl.full([], -64.0, tl.float32)  # further from the mean is only what weighs nothing
        high = tl.full([], 0.0, tl.float32)
        last = 0.0 - _search_row(
            row_ptr, scratch_ptr, length, threshold, low, high, tl.minimum(wanted, held), top, mean, True, True,
            MAX_COLLECTED, BLOCK, PIECE,
        )  # fmt: skip
    return mean, last


@triton.jit
def _draw_in(
    row_ptr, limited, args, sharpness, TYPICAL: tl.constexpr, HAS_EXTRA: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score, and its lowest id, of a row's processed logits that the filters leave.

    limited: (threshold, largest logit, mean distance from it, how far from that).
    """
    t, row, slot, _terms, _rules, _penalties, _has_extra, _stored = args
    threshold, top, mean, last = limited
    is_random = tl.load(t.temperature + slot) > 0.0
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, t.num_columns, BLOCK):
        logits = _load_block(row_ptr, start, t.num_columns, float("-inf"), LANES, BLOCK)
        logits = tl.where(_is_kept(logits, threshold, top, mean, last, TYPICAL), logits, float("-inf"))
        token = _block_tokens(start, t, HAS_EXTRA, LANES, BLOCK)
        best, best_id = _draw(
            best,
            best_id,
            logits,
            token,
            1.0,
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
    return best, best_id


@triton.jit(do_not_specialize=["num_parts"])
def _redo_kernel(
    best_ptr,
    best_id_ptr,
    threshold_ptr,
    typical_ptr,
    redo_ptr,
    scratch_ptr,
    mass_ptr,
    t,
    sharpness,
    num_parts,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    TYPICAL: tl.constexpr,
    STORED: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Search and draw a whole row, whose processed logits are put in place of the raw ones."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(redo_ptr + row) == 0:
        return
    slot = tl.load(t.row_slots + row).to(tl.int64)
    limits = _limits(t, slot)
    mass = tl.load(mass_ptr + row)
    row_ptr = t.logits + row * t.logits_stride
    scratch_ptr += row * MAX_COLLECTED
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    top, bottom = _process_row((t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, STORED), STORED, BLOCK)
    threshold = _threshold_in(
        row_ptr, scratch_ptr, t.num_columns, top, bottom, mass, limits, MAX_COLLECTED, BLOCK, PIECE
    )
    mean = tl.full([], 0.0, tl.float32)
    last = tl.full([], float("inf"), tl.float32)
    if TYPICAL:
        mean = tl.load(typical_ptr + row * 3 + 1)
        mean, last = _typical_in(
            row_ptr, scratch_ptr, t.num_columns, threshold, top, mass, mean, limits, MAX_COLLECTED, BLOCK, PIECE
        )
        tl.store(typical_ptr + row * 3, top)
        tl.store(typical_ptr + row * 3 + 1, mean)
        tl.store(typical_ptr + row * 3 + 2, last)
    tl.store(threshold_ptr + row, threshold)
    limited = (threshold, top, mean, last)
    args = (t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, True)
    best, best_id = _draw_in(row_ptr, limited, args, sharpness, TYPICAL, HAS_EXTRA, LANES, BLOCK)
    tl.store(best_ptr + row * num_parts, best)
    tl.store(best_id_ptr + row * num_parts, best_id)


def redo(
    best: torch.Tensor,
    best_id: torch.Tensor,
    threshold: torch.Tensor,
    typical: torch.Tensor,
    is_redone: torch.Tensor,
    scratch: torch.Tensor,
    mass: torch.Tensor,
    t: RowTables,
    flags: dict[str, bool],
    stored: bool,
    sharpness: float,
) -> None:
    """Do what `_filter_rows.finish` does for the rows with `is_redone [N] int8`; `scratch [N, …] float32`."""
    num_rows, num_parts = best.shape
    _redo_kernel[(num_rows,)](
        best,
        best_id,
        threshold,
        typical,
        is_redone,
        scratch,
        mass,
        t,
        sharpness,
        num_parts,
        **flags,
        STORED=stored,
        MAX_COLLECTED=scratch.shape[1],
        LANES=32 * _WARPS,
        BLOCK=_BLOCK,
        PIECE=_PIECE,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
