"""For each row with a filter, a floor: a logit that the filters' threshold almost surely reaches, for little reading.

Knows: processed logits, a row's limits. Whatever the floor, what is drawn is the same (see `_filter_rows.py`): only the
weight of a row, and the mean that typical-p goes by, must be exact, so they are sums of floats that round nowhere.
"""

# mypy: ignore-errors

import torch

from specgen.kernels._draw import BLOCK, DRAW_OPTIONS, LANES, _load_block, draw_grid
from specgen.kernels._processed import RowTables, _block_tokens, _processed, _quotient, _row_terms, _undivided
from specgen.kernels._row_thresholds import _clean, _is_typical_alone, _is_weighed, _key, _limits, _value
from specgen.kernels._triton import tl, triton

_SAMPLE = 4096  # logits that are looked at first
_WEIGHED = BLOCK // 2  # logits that are summed up together; penalties take registers


@triton.jit
def _exact_sum(values):
    """The sum of up to 1024 values from 0 to 1, as a coarse and a fine part: all addends of a part are multiples of one
    power of 2, 2^-14 or 2^-29, and 2^24 of those are what they can add up to at most. So no sum is rounded, and their
    order is free."""
    coarse = (values + 512.0) - 512.0
    fine = ((values - coarse) + 0.0234375) - 0.0234375
    return _sum(coarse), _sum(fine)


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(tl.sum(values, axis=2), axis=0), axis=0)


@triton.jit(do_not_specialize=["num_blocks"])
def _weigh_kernel(
    sums_ptr,
    t,
    span,
    num_blocks,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    TYPICAL: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit of each block of a row, the block's weight in units of that, and with TYPICAL the sum of the
    distances from it, weighted. Blocks are the same whatever the grid is."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    if _is_weighed(_limits(t, slot)) == 0:
        return
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    divisor = terms[8]
    scale = tl.div_rn(divisor * 0.0 + 1.0, divisor)
    row_ptr = t.logits + row * t.logits_stride
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    for start in range(part * span, tl.minimum((part + 1) * span, t.num_columns), BLOCK):
        logits = _load_block(row_ptr, start, t.num_columns, float("-inf"), LANES, BLOCK)
        token = _block_tokens(start, t, HAS_EXTRA, LANES, BLOCK)
        logits = _undivided(logits, start, token, t, slot, terms, False, RULES, PENALTIES, HAS_EXTRA, LANES, BLOCK)
        logits = _clean(_quotient(logits, divisor, scale))
        top = tl.max(tl.max(tl.max(logits, axis=2), axis=0), axis=0)
        top = tl.maximum(top, -3.4028234663852886e38)
        weights = tl.exp(logits - top)
        coarse, fine = _exact_sum(weights)
        out = sums_ptr + row * num_blocks + start // BLOCK
        tl.store(out, top)
        tl.store(out + plane, coarse)
        tl.store(out + 2 * plane, fine)
        if TYPICAL:
            coarse, fine = _exact_sum(weights * tl.minimum(top - logits, 100.0))
            tl.store(out + 3 * plane, coarse)
            tl.store(out + 4 * plane, fine)


@triton.jit
def _row_sums(sums_ptr, row, num_blocks, TYPICAL: tl.constexpr, BLOCKS: tl.constexpr):
    """A row's largest logit, its weight in units of 2^-35 of that, and the mean distance from it."""
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    at = sums_ptr + row * num_blocks + block
    tops = tl.load(at, mask=inside, other=-3.4028234663852886e38)
    top = tl.max(tops, axis=0)
    distance = tl.minimum(top - tops, 100.0)
    unit = tl.exp(-distance).to(tl.float64) * 34359738368.0
    weights = tl.load(at + plane, mask=inside, other=0.0).to(tl.float64)
    weights += tl.load(at + 2 * plane, mask=inside, other=0.0).to(tl.float64)
    mass = tl.sum((weights * unit).to(tl.int64), axis=0).to(tl.float64)
    mean = tl.full([], 0.0, tl.float32)
    if TYPICAL:
        moments = tl.load(at + 3 * plane, mask=inside, other=0.0).to(tl.float64)
        moments += tl.load(at + 4 * plane, mask=inside, other=0.0).to(tl.float64)
        moments = ((moments + distance.to(tl.float64) * weights) * unit).to(tl.int64)
        mean = (tl.sum(moments, axis=0).to(tl.float64) / tl.maximum(mass, 1.0)).to(tl.float32)
    return top, mass, mean


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
def _floor_of(logits, limits, num_columns, top, mass, mean, SAMPLE: tl.constexpr, MAX_COLLECTED: tl.constexpr):
    """The floor of a row of which `logits` are a sample. top, mass, mean: of a row that was weighed."""
    k, p, reach, typical, _is_on = limits
    key = _key(logits)
    share = SAMPLE / num_columns
    room = MAX_COLLECTED * 0.85 * share
    floor = tl.max(logits, axis=0) - reach
    if k > 0:  # so many more than k's share that hardly a row in a million has fewer than k from there on
        wanted = k * share
        floor = _highest_floor(key, logits, tl.minimum(wanted + 4.0 * tl.sqrt(wanted) + 4.0, room), False)
    elif _is_weighed(limits):
        # A token of weight (1 - p) * mass / 1024 or more is collected whatever the sample says. Of lighter ones the
        # sample tells the sum to within a seventh of (1 - p) * mass, so 0.6 of that is 3 deviations away.
        rest = (1.0 - tl.where(p < 1.0, p, typical)) * (mass * 2.9103830456733704e-11).to(tl.float32)
        weights = tl.exp(tl.maximum(logits - top, -80.0))
        floor = _highest_floor(key, weights, 0.6 * rest * share, True)
        floor = tl.minimum(floor, top + tl.log(rest / 1024.0))
        if _is_typical_alone(limits):  # what is nearer to the mean than the top is may all be typical
            floor = tl.minimum(floor, top - 2.0 * mean)
        floor = tl.maximum(floor, _highest_floor(key, logits, room, False))
    else:
        floor = tl.maximum(floor, _highest_floor(key, logits, room, False))
    return floor


@triton.jit(do_not_specialize=["num_blocks"])
def _look_kernel(
    floor_ptr,
    count_ptr,
    mass_ptr,
    threshold_ptr,
    typical_ptr,
    redo_ptr,
    sums_ptr,
    t,
    num_blocks,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    SAMPLE: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tl.store(count_ptr + row, 0)
    tl.store(redo_ptr + row, 0)
    tl.store(threshold_ptr + row, float("-inf"))
    slot = tl.load(t.row_slots + row).to(tl.int64)
    limits = _limits(t, slot)
    if limits[4] == 0:
        return
    floor = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0, tl.float64)
    top = tl.full([], 0, tl.float32)
    mean = tl.full([], 0, tl.float32)
    if _is_weighed(limits):
        top, mass, mean = _row_sums(sums_ptr, row, num_blocks, TYPICAL, BLOCKS)
        tl.store(mass_ptr + row, mass)
    tl.store(typical_ptr + row * 3 + 1, mean)
    if t.num_columns > MAX_COLLECTED:
        # 32 neighbours at a time, from all over the row
        place = tl.arange(0, SAMPLE)
        column = (place // 32) * (t.num_columns // (SAMPLE // 32) // 4 * 4) + place % 32
        terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
        logits, _token = _processed(column, place >= 0, (t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, False))
        floor = _floor_of(_clean(logits), limits, t.num_columns, top, mass, mean, SAMPLE, MAX_COLLECTED)
    tl.store(floor_ptr + row, floor)


def weigh(t: RowTables, num_rows: int, flags: dict[str, bool]) -> torch.Tensor:
    """Return `[5, N, blocks] float32` that `look` needs where a row has top-p or typical-p."""
    num_blocks = triton.cdiv(t.num_columns, _WEIGHED)
    sums = torch.empty((5, num_rows, num_blocks), dtype=torch.float32, device=t.logits.device)
    num_parts, span = draw_grid(num_rows, t.num_columns)
    _weigh_kernel[(num_rows, num_parts)](
        sums, t, span, num_blocks, **flags, LANES=LANES, BLOCK=_WEIGHED, **DRAW_OPTIONS
    )
    return sums
