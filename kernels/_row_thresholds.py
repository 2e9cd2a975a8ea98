"""Finds the smallest of a few logits that top-k, top-p or typical-p let stay.

Knows: processed logits, a row's limits. Doesn't know noise, nor which logits are worth a search (see `_row_floors.py`).
Sums are of integers, so that neither their order nor what else was compiled into a kernel shows in the result.

A filter keeps the tokens of the highest rank. For top-k and top-p that is the logit itself. For typical-p it is 0 less
the distance of (top - logit) from its expectation; weights stay those of the logits.
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
    """The weight in units of 2^-35 of the largest logit's, an integer."""
    return (tl.exp(tl.maximum(logits - top, -30.0)) * 34359738368.0).to(tl.int64)


@triton.jit
def _rank(logits, least, top, mean, TYPICAL: tl.constexpr):
    """The rank of clean logits; -inf below `least`."""
    rank = logits
    if TYPICAL:
        rank = 0.0 - tl.abs((top - logits) - mean)
    return tl.where(logits >= least, rank, float("-inf"))


@triton.jit
def _limits(t, slot):
    """The k (0 = off), p (1 = off), min-p reach (inf = off) and typical p (1 = off) of a slot, which may be -1, and
    whether any is on."""
    is_slot = slot >= 0
    k = tl.load(t.top_k + slot, mask=is_slot, other=0)
    k = tl.where(k < t.num_columns, tl.maximum(k, 0), 0)
    p = tl.minimum(tl.load(t.top_p + slot, mask=is_slot, other=1.0), 1.0)
    reach = tl.load(t.min_p_reach + slot, mask=is_slot, other=float("inf"))
    typical = tl.minimum(tl.load(t.typical_p + slot, mask=is_slot, other=1.0), 1.0)
    return k, p, reach, typical, (k > 0) | (p < 1.0) | (reach < float("inf")) | (typical < 1.0)


@triton.jit
def _is_typical_alone(limits):
    """Whether typical-p acts on all of a row."""
    k, p, reach, typical, _is_on = limits
    return (k == 0) & (p >= 1.0) & (reach == float("inf")) & (typical < 1.0)


@triton.jit
def _is_weighed(limits):
    """Whether a filter asks for a part of the weight of all of a row."""
    k, p, _reach, _typical, _is_on = limits
    return ((k == 0) & (p < 1.0)) | _is_typical_alone(limits)


@triton.jit
def _smallest_kept(
    source_ptr,
    length,
    least,
    low,
    high,
    wanted,
    above,
    top,
    mean,
    BY_MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The lowest rank, from `low` to `high`, above which the sum stays under `wanted`, of the `length` logits at
    `source_ptr`; `above` is the sum above `high`. There must be one."""
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
            key = _key(_rank(logits, least, top, mean, TYPICAL))
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
def _sums_from(source_ptr, length, least, top, PIECE: tl.constexpr):
    """The weight of the logits from `least` on, and the sum of their distances from `top`, weighted; whole numbers."""
    at = tl.arange(0, PIECE)
    units = tl.zeros([PIECE], tl.int64)
    moments = tl.zeros([PIECE], tl.int64)
    for start in range(0, length, PIECE):
        inside = at < length - start
        logits = _clean(tl.load(source_ptr + start + at, mask=inside, other=float("-inf")))
        inside = inside & (logits >= least)
        near = tl.minimum(top - logits, 30.0)
        units += tl.where(inside, _weight(logits, top), 0)
        moments += tl.where(inside, (tl.exp(-near) * near * 34359738368.0).to(tl.int64), 0)
    return tl.sum(units, axis=0).to(tl.float64), tl.sum(moments, axis=0).to(tl.float64)


@triton.jit
def _is_kept(logits, threshold, top, mean, last, TYPICAL: tl.constexpr):
    """Whether the filters leave a logit: from the threshold on, and no further from what is typical than `last`."""
    logits = _clean(logits)
    kept = logits >= threshold
    if TYPICAL:
        kept = kept & (tl.abs((top - logits) - mean) <= last)
    return kept
