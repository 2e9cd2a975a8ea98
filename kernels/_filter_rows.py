"""Draws the rows that top-k, top-p or min-p cut off, from a few of their logits.

Knows: processed logits (`_processed.py`), a row's limits, noise (`gumbel.py`). Doesn't know rows without a filter:
`sample_tokens.py` goes through all logits once. A row costs

    weigh    top-p without top-k only: the sum of the weights, and the largest logit       one read
    look     a sample of the row gives a floor that the threshold almost surely reaches    1/32 of a read
    collect  the ids of all logits from the floor on; by `sample_tokens.py`                one read
    finish   the threshold among those, and the draw from there                            what was collected
    redo     only where more were collected than fit, or the floor was too high: the row   a few reads, by one program
             is searched: quarter the range until few enough are left in it

Every step of a row depends on nothing but the row, and whatever the floor, the threshold is the same.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch

from specgen.kernels._processed import RowTables, _processed, _row_terms, _undivided
from specgen.kernels._row_thresholds import (
    _clean,
    _key,
    _limits,
    _mass_from,
    _search_row,
    _smallest_kept,
    _value,
)
from specgen.kernels._triton import tl, triton
from specgen.kernels.gumbel import (
    BLOCK,
    DRAW_OPTIONS,
    LANES,
    _any,
    _draw,
    _gumbel_of,
    _load_block,
    _lowest_mark,
    draw_grid,
)

_MAX_COLLECTED = 8192  # of a row; a smaller vocabulary is collected whole
_SAMPLE = 4096  # logits that are looked at first
_PIECE = 1024  # of what was collected, at a time
_REDO_BLOCK, _REDO_WARPS = 4096, 16  # of a row that is searched, at a time


class Collected(NamedTuple):
    """What was kept of each row, `[N, _MAX_COLLECTED]`, and what is known of it, `[N]`.

    ids int32, logits float32 (processed; filled by `finish`); count int32, how many there were, more than fit perhaps;
    floor float32: every processed logit from there on is in; mass float64: the weight of the row where top-p needs it;
    threshold float32: what is below goes, -inf where all filters are off; redo int8.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    count: torch.Tensor
    floor: torch.Tensor
    mass: torch.Tensor
    threshold: torch.Tensor
    redo: torch.Tensor

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> "Collected":
        """Room for so many rows."""
        f32, i32, f64 = torch.float32, torch.int32, torch.float64
        return Collected(
            torch.empty((num_rows, _MAX_COLLECTED), dtype=i32, device=device),
            torch.empty((num_rows, _MAX_COLLECTED), dtype=f32, device=device),
            *(torch.empty(num_rows, dtype=dtype, device=device) for dtype in (i32, f32, f64, f32, torch.int8)),
        )


@triton.jit
def _weigh_kernel(
    tops_ptr,
    sums_ptr,
    t,
    span,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit of each part of a row, and the weight of the part in units of that."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    k, p, _reach, _is_on = _limits(t, slot)
    if (k > 0) | (p >= 1.0):
        return
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    scale = 1.0 / terms[8]
    row_ptr = t.logits + row * t.logits_stride
    highest = tl.full([LANES], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, t.vocab_size), BLOCK):
        logits = _load_block(row_ptr, start, t.vocab_size, float("-inf"), LANES, BLOCK)
        logits = _clean(_undivided(logits, start, t, slot, terms, False, RULES, PENALTIES, LANES, BLOCK) * scale)
        higher = tl.maximum(tl.max(tl.max(logits, axis=2), axis=0), highest)
        weights = tl.exp(logits - higher[None, :, None])
        sums = sums * tl.exp(highest - higher) + tl.sum(tl.sum(weights, axis=2), axis=0)
        highest = higher
    top = tl.max(highest, axis=0)
    out = row * tl.num_programs(1) + part
    tl.store(tops_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(sums * tl.exp(highest - top), axis=0))


@triton.jit
def _row_mass(tops_ptr, sums_ptr, row, num_parts, PARTS: tl.constexpr):
    """A row's largest logit, and its weight in units of that."""
    part = tl.arange(0, PARTS)
    at = row * num_parts + part
    tops = tl.load(tops_ptr + at, mask=part < num_parts, other=-3.4028234663852886e38)
    sums = tl.load(sums_ptr + at, mask=part < num_parts, other=0.0).to(tl.float64)
    top = tl.max(tops, axis=0)
    return top, tl.sum(sums * tl.exp(tops - top).to(tl.float64), axis=0)


@triton.jit
def _highest_floor(key, weights, wanted, BY_MASS: tl.constexpr):
    """A floor for a sample: high, but `wanted` of the sample are from it on, or (BY_MASS) at most `wanted` below it."""
    low = tl.min(key, axis=0).to(tl.int64)
    high = tl.max(key, axis=0).to(tl.int64)
    for _ in range(16):
        middle = low + (high - low + 1) // 2
        if BY_MASS:
            fits = tl.sum(tl.where(key < middle, weights, 0.0), axis=0) <= wanted
        else:
            fits = tl.sum((key >= middle).to(tl.float32), axis=0) >= wanted
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, tl.maximum(middle - 1, low))
    return _value(low.to(tl.int32))


@triton.jit
def _look_kernel(
    floor_ptr,
    count_ptr,
    mass_ptr,
    threshold_ptr,
    redo_ptr,
    tops_ptr,
    sums_ptr,
    t,
    num_parts,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLE: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tl.store(count_ptr + row, 0)
    tl.store(redo_ptr + row, 0)
    tl.store(threshold_ptr + row, float("-inf"))
    slot = tl.load(t.row_slots + row).to(tl.int64)
    k, p, reach, is_on = _limits(t, slot)
    if is_on == 0:
        return
    floor = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0, tl.float64)
    top = tl.full([], 0, tl.float32)
    by_mass = (k == 0) & (p < 1.0)
    if by_mass:
        top, mass = _row_mass(tops_ptr, sums_ptr, row, num_parts, PARTS)
        tl.store(mass_ptr + row, mass * 34359738368.0)
    if t.vocab_size > MAX_COLLECTED:
        # 32 neighbours at a time, from all over the row
        place = tl.arange(0, SAMPLE)
        token = (place // 32) * (t.vocab_size // (SAMPLE // 32) // 4 * 4) + place % 32
        terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
        logits = _clean(_processed(token, place >= 0, (t, row, slot, terms, RULES, PENALTIES, False)))
        key = _key(logits)
        share = SAMPLE / t.vocab_size
        room = MAX_COLLECTED * 0.85 * share
        if k > 0:  # so many more than k's share that hardly a row in a million has fewer than k from there on
            wanted = k * share
            wanted = tl.minimum(wanted + 4.0 * tl.sqrt(wanted) + 4.0, room)
            floor = _highest_floor(key, logits, wanted, False)
        elif by_mass:
            # A token of weight (1 - p) * mass / 1024 or more is collected whatever the sample says. Of lighter ones the
            # sample tells the sum to within a seventh of (1 - p) * mass, so 0.6 of that is 3 deviations away.
            rest = (1.0 - p) * mass.to(tl.float32)
            weights = tl.exp(tl.maximum(logits - top, -80.0))
            floor = _highest_floor(key, weights, 0.6 * rest * share, True)
            floor = tl.minimum(floor, top + tl.log(rest / 1024.0))
            floor = tl.maximum(floor, _highest_floor(key, logits, room, False))
        else:
            floor = tl.max(logits, axis=0) - reach
    tl.store(floor_ptr + row, floor)


@triton.jit
def _popcount(marks):
    marks = marks.to(tl.uint32, bitcast=True)
    marks = marks - ((marks >> 1) & 0x55555555)
    marks = (marks & 0x33333333) + ((marks >> 2) & 0x33333333)
    return ((((marks + (marks >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _collect(ids_ptr, count_ptr, marks, start, LANES: tl.constexpr, MAX_COLLECTED: tl.constexpr):
    """Append the ids of a block's marks, in any order, as far as they fit."""
    if _any(marks):
        count = _popcount(marks)
        place = tl.atomic_add(count_ptr, tl.sum(count, axis=0)) + tl.cumsum(count, axis=0) - count
        while _any(marks):
            fits = (marks != 0) & (place < MAX_COLLECTED)
            tl.store(ids_ptr + place, start + _lowest_mark(marks, LANES), mask=fits)
            place += 1
            marks = marks & (marks - 1)


@triton.jit
def _finish_kernel(
    best_ptr,
    best_id_ptr,
    threshold_ptr,
    redo_ptr,
    collected_ptr,
    ids_ptr,
    count_ptr,
    floor_ptr,
    mass_ptr,
    t,
    sharpness,
    num_parts,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    STORED: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    k, p, reach, is_on = _limits(t, slot)
    if is_on == 0:
        return
    count = tl.load(count_ptr + row)
    if count > MAX_COLLECTED:
        tl.store(redo_ptr + row, 1)
        return
    floor = tl.load(floor_ptr + row)
    ids_ptr += row * MAX_COLLECTED
    source_ptr = collected_ptr + row * MAX_COLLECTED
    at = tl.arange(0, PIECE)
    args = (t, row, slot, _row_terms(t, row, slot, RULES, PENALTIES, NOISE), RULES, PENALTIES, STORED)
    tops = tl.full([PIECE], -3.4028234663852886e38, tl.float32)
    kept = tl.zeros([PIECE], tl.int32)
    for start in range(0, count, PIECE):
        inside = start + at < count
        token = tl.load(ids_ptr + start + at, mask=inside, other=0)
        logits = _processed(token, inside, args)
        # what was collected roughly, and does not belong
        logits = tl.where(_clean(logits) >= floor, logits, float("-inf"))
        tl.store(source_ptr + start + at, logits, mask=inside)
        tops = tl.maximum(tops, _clean(logits))
        kept += (_clean(logits) > float("-inf")).to(tl.int32)
    tl.debug_barrier()
    top = tl.max(tops, axis=0)
    num_kept = tl.sum(kept, axis=0)
    is_whole = floor == float("-inf")
    low = tl.where(is_whole, -3.4028234663852886e38, floor)
    threshold = low
    nothing = tl.full([], 0, tl.float64)
    fails = (k > num_kept) & (is_whole == 0)
    if (k > 0) & (k <= num_kept):
        threshold = _smallest_kept(source_ptr, count, low, top, k.to(tl.float64), nothing, top, False, PIECE)
    if (p < 1.0) & (num_kept > 0):
        held = _mass_from(source_ptr, count, threshold, top, PIECE).to(tl.float64)
        total = held
        if k == 0:
            total = tl.load(mass_ptr + row)
        wanted = tl.maximum(p.to(tl.float64) * total, 1e-9)
        fails = fails | ((held < wanted) & (is_whole == 0))
        wanted = tl.minimum(wanted, held)
        threshold = _smallest_kept(source_ptr, count, threshold, top, wanted, nothing, top, True, PIECE)
    if fails:
        tl.store(redo_ptr + row, 1)
        return
    threshold = tl.maximum(threshold, top - reach)
    tl.store(threshold_ptr + row, threshold)
    is_random = tl.load(t.temperature + slot) > 0.0
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, count, PIECE):
        inside = start + at < count
        token = tl.load(ids_ptr + start + at, mask=inside, other=0)
        logits = tl.load(source_ptr + start + at, mask=inside, other=float("-inf"))
        best, best_id = _best_kept(best, best_id, logits, threshold, token, seed, position, is_random, sharpness)
    tl.store(best_ptr + row * num_parts, best)
    tl.store(best_id_ptr + row * num_parts, best_id)


@triton.jit
def _best_kept(best, best_id, logits, threshold, token, seed, position, is_random, sharpness):
    """The best score, and its lowest id, of what gave `best` and of the logits from `threshold` on."""
    score = logits
    if is_random:
        score = logits * sharpness + _gumbel_of(seed, position, token)
    score = tl.where((_clean(logits) >= threshold) & (score == score), score, float("-inf"))
    highest = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == highest, token, 0x7FFFFFFF), axis=0)
    best_id = tl.where((highest > best) | ((highest == best) & (winner < best_id)), winner, best_id)
    return tl.maximum(highest, best), best_id


@triton.jit
def _redo_kernel(
    best_ptr,
    best_id_ptr,
    threshold_ptr,
    redo_ptr,
    scratch_ptr,
    mass_ptr,
    t,
    sharpness,
    num_parts,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
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
    k, p, reach, _is_on = _limits(t, slot)
    row_ptr = t.logits + row * t.logits_stride
    scratch_ptr += row * MAX_COLLECTED
    at = tl.arange(0, BLOCK)
    args = (t, row, slot, _row_terms(t, row, slot, RULES, PENALTIES, NOISE), RULES, PENALTIES, STORED)
    tops = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    for start in range(0, t.vocab_size, BLOCK):
        inside = start + at < t.vocab_size
        logits = _processed(start + at, inside, args)
        if not STORED:
            tl.store(row_ptr + start + at, logits, mask=inside)
        tops = tl.maximum(tops, _clean(logits))
    tl.debug_barrier()
    top = tl.max(tops, axis=0)
    threshold = tl.full([], float("-inf"), tl.float32)
    if k > 0:
        threshold = _search_row(
            row_ptr, scratch_ptr, t.vocab_size, threshold, k.to(tl.float64), top, False, MAX_COLLECTED, BLOCK, PIECE
        )
    if p < 1.0:
        total = tl.full([], 0, tl.float64)
        if k > 0:
            total = _mass_from(row_ptr, t.vocab_size, threshold, top, PIECE).to(tl.float64)
        else:
            total = tl.load(mass_ptr + row)
        wanted = tl.maximum(p.to(tl.float64) * total, 1e-9)
        threshold = _search_row(
            row_ptr, scratch_ptr, t.vocab_size, threshold, wanted, top, True, MAX_COLLECTED, BLOCK, PIECE
        )
    threshold = tl.maximum(threshold, top - reach)
    tl.store(threshold_ptr + row, threshold)
    is_random = tl.load(t.temperature + slot) > 0.0
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    stored = (t, row, slot, args[3], RULES, PENALTIES, True)
    for start in range(0, t.vocab_size, BLOCK):
        logits = _load_block(row_ptr, start, t.vocab_size, float("-inf"), LANES, BLOCK)
        logits = tl.where(_clean(logits) >= threshold, logits, float("-inf"))
        best, best_id = _draw(
            best, best_id, logits, 1.0, start, seed, position, is_random, sharpness, _processed, stored, LANES, BLOCK
        )
    tl.store(best_ptr + row * num_parts, best)
    tl.store(best_id_ptr + row * num_parts, best_id)


def look(collected: Collected, t: RowTables, flags: dict[str, bool], by_mass: bool) -> None:
    """Write each row's floor, and zero what `collect` counts. by_mass: some row may have top-p."""
    num_rows = collected.count.shape[0]
    num_parts, span = draw_grid(num_rows, t.vocab_size)
    tops, sums = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=t.logits.device)
    if by_mass:
        block = BLOCK // 2 if flags["RULES"] or flags["PENALTIES"] else BLOCK
        _weigh_kernel[(num_rows, num_parts)](tops, sums, t, span, **flags, LANES=LANES, BLOCK=block, **DRAW_OPTIONS)
    c = collected
    _look_kernel[(num_rows,)](
        c.floor,
        c.count,
        c.mass,
        c.threshold,
        c.redo,
        tops,
        sums,
        t,
        num_parts,
        **flags,
        PARTS=triton.next_power_of_2(num_parts),
        SAMPLE=_SAMPLE,
        MAX_COLLECTED=c.ids.shape[1],
        enable_fp_fusion=False,
    )


def finish(
    best: torch.Tensor,
    best_id: torch.Tensor,
    collected: Collected,
    t: RowTables,
    flags: dict[str, bool],
    stored: bool,
    sharpness: float,
) -> None:
    """Write the best score and its id of each row that has a filter on, into the first column of `best` and `best_id`.

    stored: the processed logits are in place of the raw ones.
    """
    num_rows, num_parts = best.shape
    c = collected
    _finish_kernel[(num_rows,)](
        best,
        best_id,
        c.threshold,
        c.redo,
        c.logits,
        c.ids,
        c.count,
        c.floor,
        c.mass,
        t,
        sharpness,
        num_parts,
        **flags,
        STORED=stored,
        MAX_COLLECTED=c.ids.shape[1],
        PIECE=_PIECE,
        enable_fp_fusion=False,
    )
    _redo_kernel[(num_rows,)](
        best,
        best_id,
        c.threshold,
        c.redo,
        c.logits,
        c.mass,
        t,
        sharpness,
        num_parts,
        **flags,
        STORED=stored,
        MAX_COLLECTED=c.ids.shape[1],
        LANES=32 * _REDO_WARPS,
        BLOCK=_REDO_BLOCK,
        PIECE=_PIECE,
        num_warps=_REDO_WARPS,
        enable_fp_fusion=False,
    )
