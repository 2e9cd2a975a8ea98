"""Draws the rows that top-k, top-p, min-p or typical-p cut off, from a few of their logits.

Knows: processed logits (`_processed.py`), a row's limits, noise (`_draw.py`). Doesn't know rows without a filter:
`sample_tokens.py` goes through all logits once. A row costs

    weigh    top-p without top-k, typical-p alone: the row's weight                        one read
    look     a sample of the row gives a floor that the threshold almost surely reaches    1/32 of a read
    collect  the columns of all logits from the floor on; by `_token_pass.py`              one read
    finish   the threshold among those, and the draw from there                            what was collected
    redo     only where more were collected than fit, or the floor was too high: the row   a few reads, by one program
             is searched (`_row_search.py`)

Every step of a row depends on nothing but the row, and whatever the floor, the threshold is the same.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch

from specgen.kernels._draw import _any, _gumbel_of, _lowest_mark
from specgen.kernels._processed import RowTables, _processed, _row_terms, _tokens
from specgen.kernels._row_floors import _SAMPLE, _look_kernel, weigh
from specgen.kernels._row_search import redo
from specgen.kernels._row_thresholds import (
    _clean,
    _is_kept,
    _is_typical_alone,
    _limits,
    _smallest_kept,
    _sums_from,
)
from specgen.kernels._triton import tl, triton

_MAX_COLLECTED = 8192  # of a row; a smaller vocabulary is collected whole
_PIECE = 1024  # of what was collected, at a time


class Collected(NamedTuple):
    """What was kept of each row, `[N, _MAX_COLLECTED]`, and what is known of it, `[N]`.

    columns int32, logits float32 (processed; filled by `finish`); count int32, how many there were, more than fit
    perhaps; floor float32: every processed logit from there on is in; mass float64: the weight of a row that was
    weighed; threshold float32: what is below goes, -inf where all filters are off; typical `[N, 3]` float32: the
    largest logit, the mean distance from it, and how far from that a kept one may be; redo int8.
    """

    columns: torch.Tensor
    logits: torch.Tensor
    count: torch.Tensor
    floor: torch.Tensor
    mass: torch.Tensor
    threshold: torch.Tensor
    typical: torch.Tensor
    redo: torch.Tensor

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> "Collected":
        """Room for so many rows."""
        f32, i32 = torch.float32, torch.int32
        return Collected(
            torch.empty((num_rows, _MAX_COLLECTED), dtype=i32, device=device),
            torch.empty((num_rows, _MAX_COLLECTED), dtype=f32, device=device),
            torch.empty(num_rows, dtype=i32, device=device),
            torch.empty(num_rows, dtype=f32, device=device),
            torch.empty(num_rows, dtype=torch.float64, device=device),
            torch.empty(num_rows, dtype=f32, device=device),
            torch.empty((num_rows, 3), dtype=f32, device=device),
            torch.empty(num_rows, dtype=torch.int8, device=device),
        )


@triton.jit
def _popcount(marks):
    marks = marks.to(tl.uint32, bitcast=True)
    marks = marks - ((marks >> 1) & 0x55555555)
    marks = (marks & 0x33333333) + ((marks >> 2) & 0x33333333)
    return ((((marks + (marks >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _collect(columns_ptr, count_ptr, marks, start, LANES: tl.constexpr, MAX_COLLECTED: tl.constexpr):
    """Append the columns of a block's marks, in any order, as far as they fit."""
    if _any(marks):
        count = _popcount(marks)
        place = tl.atomic_add(count_ptr, tl.sum(count, axis=0), sem="relaxed") + tl.cumsum(count, axis=0) - count
        while _any(marks):
            fits = (marks != 0) & (place < MAX_COLLECTED)
            tl.store(columns_ptr + place, start + _lowest_mark(marks, LANES), mask=fits)
            place += 1
            marks = marks & (marks - 1)


@triton.jit
def _fill(source_ptr, columns_ptr, count, floor, args, PIECE: tl.constexpr):
    """Write the processed logits of collected columns, -inf for those below the floor, which were collected by a rough
    look at them; the largest, and how many are above -inf."""
    at = tl.arange(0, PIECE)
    tops = tl.full([PIECE], -3.4028234663852886e38, tl.float32)
    kept = tl.zeros([PIECE], tl.int32)
    for start in range(0, count, PIECE):
        inside = start + at < count
        column = tl.load(columns_ptr + start + at, mask=inside, other=0)
        logits, _token = _processed(column, inside, args)
        logits = tl.where(_clean(logits) >= floor, logits, float("-inf"))
        tl.store(source_ptr + start + at, logits, mask=inside)
        tops = tl.maximum(tops, _clean(logits))
        kept += (_clean(logits) > float("-inf")).to(tl.int32)
    tl.debug_barrier()
    return tl.max(tops, axis=0), tl.sum(kept, axis=0)


@triton.jit
def _threshold_among(source_ptr, count, num_kept, floor, top, mass, limits, PIECE: tl.constexpr):
    """The smallest logit that top-k, top-p and min-p leave, and whether it can't be told from what was collected."""
    k, p, reach, _typical, _is_on = limits
    is_whole = floor == float("-inf")
    low = tl.where(is_whole, -3.4028234663852886e38, floor)
    threshold = low
    none = tl.full([], 0, tl.float64)
    fails = (k > num_kept) & (is_whole == 0)
    if (k > 0) & (k <= num_kept):
        threshold = _smallest_kept(
            source_ptr, count, low, low, top, k.to(tl.float64), none, top, top, False, False, PIECE
        )
    if (p < 1.0) & (num_kept > 0):
        held, _moments = _sums_from(source_ptr, count, threshold, top, PIECE)
        total = tl.where(k == 0, mass, held)
        wanted = tl.maximum(p.to(tl.float64) * total, 1e-9)
        fails = fails | ((held < wanted) & (is_whole == 0))
        wanted = tl.minimum(wanted, held)
        threshold = _smallest_kept(
            source_ptr, count, threshold, threshold, top, wanted, none, top, top, True, False, PIECE
        )
    fails = fails | ((k == 0) & (p >= 1.0) & (reach < float("inf")) & (top - reach < floor))
    return tl.maximum(threshold, top - reach), fails


@triton.jit
def _typical_among(source_ptr, count, num_kept, floor, threshold, top, mass, mean, limits, PIECE: tl.constexpr):
    """How typical-p cuts what is left from `threshold` on: the mean distance from the top, how far from it a kept one
    may be, and whether that can't be told from what was collected."""
    typical = limits[3]
    last = tl.full([], float("inf"), tl.float32)
    fails = num_kept < 0
    if (typical < 1.0) & (num_kept > 0):
        held, moments = _sums_from(source_ptr, count, threshold, top, PIECE)
        is_alone = _is_typical_alone(limits)
        is_whole = floor == float("-inf")
        mean = tl.where(is_alone, mean, (moments / held).to(tl.float32))
        wanted = tl.maximum(typical.to(tl.float64) * tl.where(is_alone, mass, held), 1e-9)
        fails = (held < wanted) & (is_whole == 0)
        wanted = tl.minimum(wanted, held)
        none = tl.full([], 0, tl.float64)
        lowest = tl.full([], -3.4028234663852886e38, tl.float32)
        highest = tl.full([], 0.0, tl.float32)
        last = 0.0 - _smallest_kept(
            source_ptr, count, threshold, lowest, highest, wanted, none, top, mean, True, True, PIECE
        )
        # logits below the floor are further away than this
        fails = fails | (is_alone & (is_whole == 0) & ((top - floor) - mean <= last))
    return mean, last, fails


@triton.jit
def _draw_among(
    source_ptr, columns_ptr, count, limited, t, row, slot, sharpness, TYPICAL: tl.constexpr, HAS_EXTRA: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The best score, and its lowest id, of the collected logits that the filters leave.

    limited: (threshold, largest logit, mean distance from it, how far from that).
    """
    threshold, top, mean, last = limited
    at = tl.arange(0, PIECE)
    is_random = tl.load(t.temperature + slot) > 0.0
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, count, PIECE):
        inside = start + at < count
        column = tl.load(columns_ptr + start + at, mask=inside, other=0)
        token = _tokens(column, t, HAS_EXTRA)
        logits = tl.load(source_ptr + start + at, mask=inside, other=float("-inf"))
        score = logits
        if is_random:
            score = logits * sharpness + _gumbel_of(seed, position, token)
        kept = _is_kept(logits, threshold, top, mean, last, TYPICAL)
        score = tl.where(kept & (score == score), score, float("-inf"))
        highest = tl.max(score, axis=0)
        winner = tl.min(tl.where(score == highest, token, 0x7FFFFFFF), axis=0)
        best_id = tl.where((highest > best) | ((highest == best) & (winner < best_id)), winner, best_id)
        best = tl.maximum(highest, best)
    return best, best_id


@triton.jit(do_not_specialize=["num_parts"])  # of every size of a batch
def _finish_kernel(
    best_ptr,
    best_id_ptr,
    threshold_ptr,
    typical_ptr,
    redo_ptr,
    collected_ptr,
    columns_ptr,
    count_ptr,
    floor_ptr,
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
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    limits = _limits(t, slot)
    if limits[4] == 0:
        return
    count = tl.load(count_ptr + row)
    if count > MAX_COLLECTED:
        tl.store(redo_ptr + row, 1)
        return
    floor = tl.load(floor_ptr + row)
    mass = tl.load(mass_ptr + row)
    columns_ptr += row * MAX_COLLECTED
    source_ptr = collected_ptr + row * MAX_COLLECTED
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    top, num_kept = _fill(
        source_ptr, columns_ptr, count, floor, (t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, STORED), PIECE
    )
    threshold, fails = _threshold_among(source_ptr, count, num_kept, floor, top, mass, limits, PIECE)
    mean = tl.full([], 0.0, tl.float32)
    last = tl.full([], float("inf"), tl.float32)
    if TYPICAL:
        mean = tl.load(typical_ptr + row * 3 + 1)
        mean, last, fails_too = _typical_among(
            source_ptr, count, num_kept, floor, threshold, top, mass, mean, limits, PIECE
        )
        fails = fails | fails_too
    if fails:
        tl.store(redo_ptr + row, 1)
        return
    tl.store(threshold_ptr + row, threshold)
    if TYPICAL:
        tl.store(typical_ptr + row * 3, top)
        tl.store(typical_ptr + row * 3 + 1, mean)
        tl.store(typical_ptr + row * 3 + 2, last)
    limited = (threshold, top, mean, last)
    best, best_id = _draw_among(
        source_ptr, columns_ptr, count, limited, t, row, slot, sharpness, TYPICAL, HAS_EXTRA, PIECE
    )
    tl.store(best_ptr + row * num_parts, best)
    tl.store(best_id_ptr + row * num_parts, best_id)


def look(t: RowTables, num_rows: int, flags: dict[str, bool], is_weighed: bool) -> Collected:
    """Return room for each row's logits, with its floor. is_weighed: some row may have top-p or typical-p."""
    c = Collected.empty(num_rows, t.logits.device)
    sums = weigh(t, num_rows, flags) if is_weighed else c.logits  # not read
    num_blocks = sums.shape[-1] if is_weighed else 1
    _look_kernel[(num_rows,)](
        c.floor,
        c.count,
        c.mass,
        c.threshold,
        c.typical,
        c.redo,
        sums,
        t,
        num_blocks,
        **flags,
        BLOCKS=triton.next_power_of_2(num_blocks),
        SAMPLE=_SAMPLE,
        MAX_COLLECTED=c.columns.shape[1],
        num_warps=8,
        enable_fp_fusion=False,
    )
    return c


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
        c.typical,
        c.redo,
        c.logits,
        c.columns,
        c.count,
        c.floor,
        c.mass,
        t,
        sharpness,
        num_parts,
        **flags,
        STORED=stored,
        MAX_COLLECTED=c.columns.shape[1],
        PIECE=_PIECE,
        enable_fp_fusion=False,
    )
    redo(best, best_id, c.threshold, c.typical, c.redo, c.logits, c.mass, t, flags, stored, sharpness)
