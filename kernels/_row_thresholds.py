"""Where the top-k, top-p and min-p filters cut a row off: its threshold, the smallest logit that stays.

Knows: processed logits and a row's three limits. Doesn't know noise. A threshold costs a few reads of the row at most:

    stats    the largest logit of every SUB neighbours, the sum of weights of every BLOCK            one read
    cut      the rank-th largest of those maxima: at least `rank` logits are as large                no read
    collect  all logits from the cut on, a few hundred as a rule; only SUBs whose largest is there   part of a read
    search   the threshold among those. If it lies below the cut (a flat row), or if they were too
             many, the row itself is searched: quarter the range until few enough are left in it     a read each time

Sums of weights are of integers, or in an order that the vocabulary alone decides, so that neither the row's company nor
the order in which programs run shows in the result.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch

from specgen.kernels._triton import tl, triton

SUB = 128  # logits that share a maximum
BLOCK = 4096  # logits of a program
_MAX_COLLECTED = 4096
_PIECE = 1024  # of the collected ones, at a time
_SEARCH_BLOCK = 4096  # of a row that is searched, at a time


@triton.jit
def _clean(logits):
    """NaN as -inf, infinity as the largest finite number, -0 as 0: as in the twin's comparisons."""
    logits = tl.where(logits != logits, float("-inf"), logits)
    logits = tl.where(logits == 0.0, 0.0, logits)
    return tl.minimum(logits, 3.4028234663852886e38)


@triton.jit
def _key(value):
    """The order-preserving integer image of a float32."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits, top):
    return (tl.exp(tl.maximum(logits - top, -30.0)) * 34359738368.0).to(tl.int64)


@triton.jit
def _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, HAS_REACH: tl.constexpr):
    """The k (0 = off), p (1 = off) and min-p reach (inf = off) of a slot, which may be -1, and whether any is on."""
    k = tl.load(top_k_ptr + slot, mask=slot >= 0, other=0)
    k = tl.where(k < vocab_size, tl.maximum(k, 0), 0)
    p = tl.minimum(tl.load(top_p_ptr + slot, mask=slot >= 0, other=1.0), 1.0)
    reach = tl.full([], float("inf"), tl.float32)
    if HAS_REACH:
        reach = tl.load(reach_ptr + slot, mask=slot >= 0, other=float("inf"))
    return k, p, reach, (k > 0) | (p < 1.0) | (reach < float("inf"))


@triton.jit
def _store_stats(tops_ptr, sums_ptr, row, block, num_subs, num_blocks, logits, BLOCK: tl.constexpr, SUB: tl.constexpr):
    """Store what `thresholds` needs of a block of clean logits (-inf behind the vocabulary's end)."""
    subs = block * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB)
    tops = tl.max(tl.reshape(logits, [BLOCK // SUB, SUB]), axis=1)
    tl.store(tops_ptr + row * num_subs + subs, tops, mask=subs < num_subs)
    top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)
    tl.store(sums_ptr + row * num_blocks + block, tl.sum(_weight(logits, top), axis=0))


@triton.jit
def _stats_kernel(
    tops_ptr,
    sums_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    vocab_size,
    num_subs,
    HAS_REACH: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    _k, _p, _reach, is_on = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, HAS_REACH)
    if is_on == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    _store_stats(tops_ptr, sums_ptr, row, tl.program_id(1), num_subs, tl.num_programs(1), _clean(logits), BLOCK, SUB)


@triton.jit
def _cut_kernel(
    cut_ptr,
    mass_ptr,
    num_collected_ptr,
    tops_ptr,
    sums_ptr,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    vocab_size,
    num_subs,
    num_blocks,
    HAS_REACH: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    SUBS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """From where on a row's logits are collected, and the weight of all of them in units of the largest's."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(num_collected_ptr + row, 0)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    k, p, _reach, _is_on = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, HAS_REACH)
    if (k == 0) & (p >= 1.0):
        return
    sub = tl.arange(0, SUBS)
    tops = tl.load(tops_ptr + row * num_subs + sub, mask=sub < num_subs, other=float("-inf"))
    top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)

    # Halve the range of keys, both ends keys that are there, for the rank-th largest maximum.
    rank = tl.where(k > 0, tl.minimum(k, num_subs), (num_subs + 1) // 2)
    keys = tl.where(sub < num_subs, _key(tops), -0x80000000)
    low = tl.min(tl.where(sub < num_subs, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        above = keys > middle
        if tl.sum(above.to(tl.int32), axis=0) < rank:
            high = tl.max(tl.where(above, -0x80000000, keys), axis=0).to(tl.int64)
        else:
            low = tl.min(tl.where(above, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    tl.store(cut_ptr + row, _value(high.to(tl.int32)))

    block = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * num_blocks + block, mask=block < num_blocks, other=0).to(tl.float64)
    best = tl.full([BLOCKS], float("-inf"), tl.float32)
    for i in range(PER_BLOCK):  # the largest of each block again, from its maxima
        at = block * PER_BLOCK + i
        inside = (block < num_blocks) & (at < num_subs)
        best = tl.maximum(best, tl.load(tops_ptr + row * num_subs + at, mask=inside, other=float("-inf")))
    factor = tl.exp(tl.maximum(tl.maximum(best, -3.4028234663852886e38) - top, -100.0)).to(tl.float64)
    tl.store(mass_ptr + row, tl.sum(sums * factor, axis=0))


@triton.jit
def _collect_kernel(
    collected_ptr,
    num_collected_ptr,
    cut_ptr,
    tops_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    vocab_size,
    num_subs,
    HAS_REACH: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    """Copy a row's logits from the cut on to its scratch, in any order, as far as they fit."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    k, p, _reach, _is_on = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, HAS_REACH)
    if (k == 0) & (p >= 1.0):
        return
    cut = tl.load(cut_ptr + row)
    sub = tl.program_id(1) * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB)
    has_some = tl.load(tops_ptr + row * num_subs + sub, mask=sub < num_subs, other=float("-inf")) >= cut
    if (tl.max(has_some.to(tl.int32), axis=0) == 0) | (cut == float("-inf")):
        return
    token = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    mask = has_some[:, None] & (token < vocab_size)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=float("-inf"))
    logits = tl.reshape(_clean(logits), [BLOCK])
    chosen = (logits >= cut).to(tl.int32)
    place = tl.atomic_add(num_collected_ptr + row, tl.sum(chosen, axis=0)) + tl.cumsum(chosen, axis=0) - 1
    kept = (chosen != 0) & (place < MAX_COLLECTED)
    tl.store(collected_ptr + row * MAX_COLLECTED + place, logits, mask=kept)


@triton.jit
def _smallest_kept(source_ptr, length, low, high, wanted, above, top, BY_MASS: tl.constexpr, PIECE: tl.constexpr):
    """The smallest of the `length` logits at `source_ptr`, from `low` to `high`, above which the sum stays under
    `wanted`; `above` is the sum above `high`. There must be one."""
    at = tl.arange(0, PIECE)
    low_key = _key(low).to(tl.int64)
    high_key = _key(high).to(tl.int64)
    most = high_key
    while low_key < high_key:
        middle = low_key + (high_key - low_key) // 2
        units = tl.zeros([PIECE], tl.int64)
        highest = tl.full([PIECE], -0x80000000, tl.int32)
        lowest = tl.full([PIECE], 0x7FFFFFFF, tl.int32)
        for start in range(0, length, PIECE):
            inside = at < length - start
            logits = _clean(tl.load(source_ptr + start + at, mask=inside, other=float("-inf")))
            key = _key(logits)
            inside = inside & (key <= most)
            over = inside & (key > middle)
            if BY_MASS:
                units += tl.where(over, _weight(logits, top), 0)
            else:
                units += over.to(tl.int64)
            highest = tl.maximum(highest, tl.where(inside & (key <= middle), key, -0x80000000))
            lowest = tl.minimum(lowest, tl.where(over, key, 0x7FFFFFFF))
        if above + tl.sum(units, axis=0).to(tl.float64) < wanted:
            high_key = tl.maximum(tl.max(highest, axis=0).to(tl.int64), low_key)
        else:
            low_key = tl.minimum(tl.min(lowest, axis=0).to(tl.int64), high_key)
    return _value(high_key.to(tl.int32))


@triton.jit
def _smallest_from(row_ptr, vocab_size, least, top, BLOCK: tl.constexpr):
    """The smallest finite logit of a row that is at least `least`, `top` if there is none."""
    at = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], 3.4028234663852886e38, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _clean(tl.load(row_ptr + start + at, mask=at < vocab_size - start, other=float("-inf")))
        counts = (logits > float("-inf")) & (logits >= least)
        lowest = tl.minimum(lowest, tl.where(counts, logits, 3.4028234663852886e38))
    return tl.minimum(tl.min(lowest, axis=0), top)


@triton.jit
def _search_row(
    row_ptr,
    scratch_ptr,
    vocab_size,
    least,
    wanted,
    top,
    BY_MASS: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """What `_smallest_kept` finds among all of a row's logits from `least` on."""
    at = tl.arange(0, BLOCK)
    # The threshold is in (low, high], if the sum above `low` reaches what is wanted; that above `high` doesn't.
    if BY_MASS:  # what is further down weighs nothing; strictly below `top`, however large that is
        low = tl.minimum(top - 31.0, _value(_key(top) - 1))
        low = tl.where(least > low, _value(_key(least) - 1), low)
    else:
        low = _smallest_from(row_ptr, vocab_size, least, top, BLOCK)
    high = top
    left = tl.full([], 0, tl.int32) + vocab_size
    above = tl.full([], 0, tl.float64)
    reached = left > 0
    rounds = tl.full([], 0, tl.int32)
    while (rounds == 0) | ((left > MAX_COLLECTED) & (rounds < 12)):
        quarter = high * 0.25 - low * 0.25
        first = low + quarter
        second = low + quarter * 2.0
        third = low + quarter * 3.0
        counts_0 = tl.zeros([BLOCK], tl.int32)
        counts_1 = tl.zeros([BLOCK], tl.int32)
        counts_2 = tl.zeros([BLOCK], tl.int32)
        counts_3 = tl.zeros([BLOCK], tl.int32)
        masses_0 = tl.zeros([BLOCK], tl.float32)
        masses_1 = tl.zeros([BLOCK], tl.float32)
        masses_2 = tl.zeros([BLOCK], tl.float32)
        masses_3 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
            logits = _clean(tl.load(row_ptr + start + at, mask=at < vocab_size - start, other=float("-inf")))
            inside = (logits > low) & (logits <= high)
            counts_0 += inside.to(tl.int32)
            counts_1 += (inside & (logits > first)).to(tl.int32)
            counts_2 += (inside & (logits > second)).to(tl.int32)
            counts_3 += (inside & (logits > third)).to(tl.int32)
            if BY_MASS:
                mass = tl.where(inside, tl.exp(tl.maximum(logits - top, -31.0)), 0.0)
                masses_0 += mass
                masses_1 += tl.where(logits > first, mass, 0.0)
                masses_2 += tl.where(logits > second, mass, 0.0)
                masses_3 += tl.where(logits > third, mass, 0.0)
        num_0 = tl.sum(counts_0, axis=0)
        num_1 = tl.sum(counts_1, axis=0)
        num_2 = tl.sum(counts_2, axis=0)
        num_3 = tl.sum(counts_3, axis=0)
        if BY_MASS:  # in an order that is the same for every row, so that floats do
            sum_0 = tl.sum(masses_0, axis=0).to(tl.float64) * 34359738368.0
            sum_1 = tl.sum(masses_1, axis=0).to(tl.float64) * 34359738368.0
            sum_2 = tl.sum(masses_2, axis=0).to(tl.float64) * 34359738368.0
            sum_3 = tl.sum(masses_3, axis=0).to(tl.float64) * 34359738368.0
        else:
            sum_0 = num_0.to(tl.float64)
            sum_1 = num_1.to(tl.float64)
            sum_2 = num_2.to(tl.float64)
            sum_3 = num_3.to(tl.float64)
        in_3 = above + sum_3 >= wanted
        in_2 = above + sum_2 >= wanted
        in_1 = above + sum_1 >= wanted
        reached = above + sum_0 >= wanted  # else every logit in the range stays, and the smallest
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
        high = tl.where(in_3, high, tl.where(in_2, third, tl.where(in_1, second, first)))
        left = tl.where(in_3, num_3, tl.where(in_2, num_2 - num_3, tl.where(in_1, num_1 - num_2, num_0 - num_1)))
        left = tl.where(reached, left, 0)
        above += tl.where(in_3, 0.0, tl.where(in_2, sum_3, tl.where(in_1, sum_2, sum_1)))
        rounds += 1
    fits = reached & (left <= MAX_COLLECTED)
    offset = tl.full([], 0, tl.int32)
    if fits:
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            logits = _clean(tl.load(row_ptr + start + at, mask=at < vocab_size - start, other=float("-inf")))
            chosen = ((logits > low) & (logits <= high)).to(tl.int32)
            count = tl.sum(chosen, axis=0)
            if count > 0:
                place = offset + tl.cumsum(chosen, axis=0) - 1
                tl.store(scratch_ptr + place, logits, mask=(chosen != 0) & (place < MAX_COLLECTED))
                offset += count
        tl.debug_barrier()
    if reached == 0:
        low = _smallest_from(row_ptr, vocab_size, least, top, BLOCK)
        high = low
    source = tl.where(fits, scratch_ptr, row_ptr)
    length = tl.where(fits, offset, vocab_size)
    return _smallest_kept(source, length, low, high, wanted, above, top, BY_MASS, PIECE)


@triton.jit
def _mass_from(source_ptr, length, least, top, PIECE: tl.constexpr):
    """The weight of the logits from `least` on."""
    at = tl.arange(0, PIECE)
    units = tl.zeros([PIECE], tl.int64)
    for start in range(0, length, PIECE):
        logits = _clean(tl.load(source_ptr + start + at, mask=at < length - start, other=float("-inf")))
        units += tl.where((at < length - start) & (logits >= least), _weight(logits, top), 0)
    return tl.sum(units, axis=0)


@triton.jit
def _search_kernel(
    threshold_ptr,
    collected_ptr,
    num_collected_ptr,
    cut_ptr,
    mass_ptr,
    tops_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    reach_ptr,
    vocab_size,
    num_subs,
    HAS_REACH: tl.constexpr,
    SUBS: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    k, p, reach, is_on = _limits(slot, top_k_ptr, top_p_ptr, reach_ptr, vocab_size, HAS_REACH)
    if is_on == 0:
        tl.store(threshold_ptr + row, float("-inf"))
        return
    sub = tl.arange(0, SUBS)
    tops = tl.load(tops_ptr + row * num_subs + sub, mask=sub < num_subs, other=float("-inf"))
    top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)
    cut = tl.load(cut_ptr + row)
    count = tl.load(num_collected_ptr + row)
    scratch_ptr = collected_ptr + row * MAX_COLLECTED
    row_ptr = logits_ptr + row * logits_stride
    whole = (count > 0) & (count <= MAX_COLLECTED)  # the scratch holds every logit from the cut on
    threshold = tl.full([], float("-inf"), tl.float32)
    wanted = k.to(tl.float64)
    nothing = tl.full([], 0, tl.float64)
    if k > 0:
        whole = whole & (k <= count)
        if whole:
            threshold = _smallest_kept(scratch_ptr, count, cut, top, wanted, nothing, top, False, PIECE)
        else:
            threshold = _search_row(
                row_ptr, scratch_ptr, vocab_size, threshold, wanted, top, False, MAX_COLLECTED, BLOCK, PIECE
            )
    if p < 1.0:
        source = tl.where(whole, scratch_ptr, row_ptr)
        length = tl.where(whole, count, vocab_size)
        total = tl.load(mass_ptr + row)
        held = tl.full([], 0, tl.int64)
        if whole | (k > 0):
            held = _mass_from(source, length, threshold, top, PIECE)
        if k > 0:
            total = held.to(tl.float64)
        wanted = tl.maximum(p.to(tl.float64) * total, 1e-9)
        if whole & (held.to(tl.float64) >= wanted):
            low = tl.maximum(cut, threshold)
            threshold = _smallest_kept(scratch_ptr, count, low, top, wanted, nothing, top, True, PIECE)
        else:
            threshold = _search_row(
                row_ptr, scratch_ptr, vocab_size, threshold, wanted, top, True, MAX_COLLECTED, BLOCK, PIECE
            )
    tl.store(threshold_ptr + row, tl.maximum(threshold, top - reach))


class RowStats(NamedTuple):
    """`tops [N, ceil(V / SUB)] float32`, the largest clean logit of each SUB; `sums [N, ceil(V / BLOCK)] int64`, the
    weight of each BLOCK in units of its own largest."""

    tops: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def empty(num_rows: int, vocab: int, device: torch.device) -> "RowStats":
        """Room for so many rows."""
        return RowStats(
            torch.empty((num_rows, triton.cdiv(vocab, SUB)), dtype=torch.float32, device=device),
            torch.empty((num_rows, triton.cdiv(vocab, BLOCK)), dtype=torch.int64, device=device),
        )


def row_thresholds(
    stats: RowStats,
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p_reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the smallest logit that stays in each row, `[N] float32`, -inf where all filters are off.

    `stats`: those of the rows that have a filter on; `min_p_reach [R] float32` as in `min_p.py`, None without it; the
    rest as in `apply_top_k_top_p`. Never synchronises.
    """
    num_rows, vocab = logits.shape
    num_subs, num_blocks, device = stats.tops.shape[1], stats.sums.shape[1], logits.device
    threshold = torch.empty(num_rows, dtype=torch.float32, device=device)
    cut = torch.empty(num_rows, dtype=torch.float32, device=device)
    mass = torch.empty(num_rows, dtype=torch.float64, device=device)
    num_collected = torch.empty(num_rows, dtype=torch.int32, device=device)
    collected = torch.empty((num_rows, _MAX_COLLECTED), dtype=torch.float32, device=device)
    limits = (row_slots, top_k, top_p, min_p_reach, vocab, num_subs)
    has_reach = min_p_reach is not None
    subs = triton.next_power_of_2(num_subs)
    _cut_kernel[(num_rows,)](
        cut,
        mass,
        num_collected,
        *stats,
        *limits,
        num_blocks,
        HAS_REACH=has_reach,
        PER_BLOCK=BLOCK // SUB,
        SUBS=subs,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    of_row = (logits, logits.stride(0))
    _collect_kernel[(num_rows, num_blocks)](
        collected,
        num_collected,
        cut,
        stats.tops,
        *of_row,
        *limits,
        HAS_REACH=has_reach,
        MAX_COLLECTED=_MAX_COLLECTED,
        BLOCK=BLOCK,
        SUB=SUB,
        num_warps=8,
    )
    _search_kernel[(num_rows,)](
        threshold,
        collected,
        num_collected,
        cut,
        mass,
        stats.tops,
        *of_row,
        *limits,
        HAS_REACH=has_reach,
        SUBS=subs,
        MAX_COLLECTED=_MAX_COLLECTED,
        BLOCK=_SEARCH_BLOCK,
        PIECE=_PIECE,
        num_warps=16,
    )
    return threshold
