"""Searches a row, or a few of its logits, for the smallest that top-k, top-p or min-p let stay.

Knows: processed logits, a row's three limits. Doesn't know noise, nor which logits are worth a search (see
`_filter_rows.py`). Sums of weights are of integers, or in an order that the vocabulary alone decides, so that neither
the row's company nor the order in which programs run shows in the result.
"""

# mypy: ignore-errors

from specgen.kernels._triton import tl, triton


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
def _limits(t, slot):
    """The k (0 = off), p (1 = off) and min-p reach (inf = off) of a slot, which may be -1, and whether any is on."""
    k = tl.load(t.top_k + slot, mask=slot >= 0, other=0)
    k = tl.where(k < t.vocab_size, tl.maximum(k, 0), 0)
    p = tl.minimum(tl.load(t.top_p + slot, mask=slot >= 0, other=1.0), 1.0)
    reach = tl.load(t.min_p_reach + slot, mask=slot >= 0, other=float("inf"))
    return k, p, reach, (k > 0) | (p < 1.0) | (reach < float("inf"))


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
