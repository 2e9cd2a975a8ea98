"""Top-k and top-p (nucleus) filters: removed logits become -inf.

Knows: one row's logits and its two limits. Both filters keep all logits at or above a threshold, so ties stay or go
together. Probabilities are fixed-point integers (units of 2^-35 of the row's largest), whose sums have no order: a
row's result can't depend on how the sum was split.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_ONE = 2.0**35  # the weight of the row's largest logit; 150,000 such weights still add up exactly in float64
_NUM_BUCKETS = 1024  # the twin's buckets by distance from the top; weights are 0 before the last one
_BUCKETS_PER_UNIT = 40.0
_CHUNK_ELEMENTS = 1 << 18  # working set of the twin: stays in the second-level cache
_LARGEST = torch.finfo(torch.float32).max
_MINUS_INF = torch.tensor(-torch.inf)


def apply_top_k_top_p(logits: torch.Tensor, row_slots: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` keeps its top-k and, of those, its top-p set; the rest is -inf. In place.

    `row_slots [N] int32` (-1 = padded), `top_k [R] int32` (0 = off), `top_p [R] float32` (1 = off). Top-k keeps every
    logit that is at least the k-th largest. Top-p then keeps a logit iff the probability (renormalised after top-k)
    of all strictly larger ones is below p; the largest always stays. Rows with both off, and padded rows, are
    untouched; NaN is removed from the others.
    Raises: ValueError on a wrong dtype, shape or layout. Source: Holtzman et al., arXiv 1904.09751 (nucleus sampling).
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("top_k", top_k, torch.int32, None)
    check("top_p", top_p, torch.float32, top_k.shape[0])
    check_same_device(logits=logits, row_slots=row_slots, top_k=top_k, top_p=top_p)
    op = apply_top_k_top_p_triton if logits.is_cuda else apply_top_k_top_p_torch
    op(logits, row_slots, top_k, top_p)


def apply_top_k_top_p_torch(
    logits: torch.Tensor, row_slots: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Do what `apply_top_k_top_p` does, by torch operations."""
    vocab = logits.shape[1]
    slots = row_slots.long().clamp(min=0)
    k, p = top_k[slots].double(), top_p[slots].double()
    live = row_slots >= 0
    for chosen, limit, by_mass in ((live & (k > 0) & (k < vocab), k, False), (live & (p < 1), p, True)):
        rows = chosen.nonzero().flatten()
        step = max(1, _CHUNK_ELEMENTS // vocab)
        for start in range(0, rows.numel(), step):
            part = rows[start : start + step]
            first, count = int(part[0]), part.numel()
            if int(part[-1]) - first == count - 1:
                block = logits[first : first + count]  # adjacent rows: a view
                torch.where(block >= _threshold(block, limit[part], by_mass), block, _MINUS_INF, out=block)
            else:
                block = logits[part]
                logits[part] = torch.where(block >= _threshold(block, limit[part], by_mass), block, _MINUS_INF)


def _threshold(logits: torch.Tensor, limit: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Return the smallest logit that top-k or (`by_mass`) top-p keeps in each row of `logits [n, V]`, as `[n, 1]`."""
    top = logits.amax(dim=1, keepdim=True)
    if not bool((top.abs() < torch.inf).all()):
        logits = torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_LARGEST)
        top = logits.amax(dim=1, keepdim=True).clamp_(min=-_LARGEST)
    below = top - logits
    if by_mass:
        # float64 inside, so that a library's last bit hardly ever reaches the integer; exp(-30) is 0 units.
        units = below.clamp(max=30.0).neg_().double().exp_().mul_(_ONE).long()
        wanted = (limit * units.sum(dim=1))[:, None]
    else:
        units = torch.ones((), dtype=torch.int64).expand(logits.shape)
        wanted = limit[:, None]
    return _edge(logits, below, units, wanted)


def _edge(logits: torch.Tensor, below: torch.Tensor, units: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit of each row, `[n, 1]`, above which the summed `units [n, V]` stay under `wanted [n,
    1]`.

    Sums by bucket of distance from the top, `below [n, V]`, find the bucket in which that happens; only its logits
    are put in order. Overwrites `below`.
    """
    num_rows = logits.shape[0]
    bucket = below.mul_(_BUCKETS_PER_UNIT).clamp_(max=_NUM_BUCKETS - 1).floor_()
    in_bucket = torch.zeros((num_rows, _NUM_BUCKETS), dtype=torch.int64).scatter_add_(1, bucket.long(), units)
    through = in_bucket.cumsum(dim=1)
    at = (through < wanted).sum(dim=1, keepdim=True).clamp(max=_NUM_BUCKETS - 1)
    above = (through - in_bucket).gather(1, at)

    rows, ids = (bucket == at.float()).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    column = torch.arange(rows.numel()) - (counts.cumsum(0) - counts)[rows]
    values = torch.full((num_rows, max(int(counts.max()), 1)), -torch.inf)
    values[rows, column] = logits[rows, ids]
    of_value = torch.zeros(values.shape, dtype=torch.int64)
    of_value[rows, column] = units[rows, ids]
    values, order = values.sort(dim=1, descending=True)
    of_value = of_value.gather(1, order)
    kept = (above + of_value.cumsum(dim=1) - of_value < wanted).sum(dim=1, keepdim=True)
    return values.gather(1, (kept - 1).clamp(min=0))


# --- kernel -----------------------------------------------------------------------------------------------------------
# The same way in parallel: sums by bucket, the bucket that holds the edge, its logits copied out, a search among those.
# Every sum is of integers, so neither the split of a row over programs nor the order of atomics shows in the result.

_BLOCK = 4096
_PROGRAMS = 1024  # about how many programs share the rows
_MAX_COLLECTED = 16384  # a bucket with more logits is searched in place


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
def _bucket(logits, top):
    return tl.minimum((tl.minimum(top - logits, 30.0) * 40.0).to(tl.int32), 1023)


@triton.jit
def _top_of(top_key_ptr, row):
    return tl.maximum(_value(tl.load(top_key_ptr + row)), -3.4028234663852886e38)


@triton.jit
def _limits(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size):
    """The row's k (0 = off) and p (1 = off)."""
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    k = tl.load(top_k_ptr + slot, mask=slot >= 0, other=0)
    p = tl.load(top_p_ptr + slot, mask=slot >= 0, other=1.0)
    return tl.where(k < vocab_size, tl.maximum(k, 0), 0), tl.minimum(p, 1.0)


@triton.jit
def _is_off(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BY_MASS: tl.constexpr):
    k, p = _limits(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if BY_MASS:
        return p >= 1.0
    else:
        return k == 0


@triton.jit
def _top_kernel(
    top_key_ptr, logits_ptr, logits_stride, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k, p = _limits(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if (k == 0) & (p >= 1.0):
        return
    at = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        logits = tl.load(
            logits_ptr + row * logits_stride + start + at, mask=at < vocab_size - start, other=float("-inf")
        )
        largest = tl.maximum(largest, _clean(logits))
    tl.atomic_max(top_key_ptr + row, _key(tl.max(largest, axis=0)))


@triton.jit
def _histogram_kernel(
    sums_ptr,
    top_key_ptr,
    threshold_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up each bucket's units; the last bucket's aren't needed (mass 0, or whatever the others leave)."""
    row = tl.program_id(0).to(tl.int64)
    if _is_off(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BY_MASS):
        return
    top = _top_of(top_key_ptr, row)
    lowest = tl.load(threshold_ptr + row)
    at = tl.arange(0, BLOCK)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        inside = at < vocab_size - start
        logits = _clean(tl.load(logits_ptr + row * logits_stride + start + at, mask=inside, other=float("-inf")))
        bucket = _bucket(logits, top)
        units = tl.full([BLOCK], 1, tl.int64)
        if BY_MASS:
            units = _weight(logits, top)
        counted = inside & (logits >= lowest) & (bucket < 1023) & (units > 0)
        tl.atomic_add(sums_ptr + row * 1024 + bucket, units, mask=counted)


@triton.jit
def _bucket_kernel(
    edge_bucket_ptr,
    above_ptr,
    wanted_ptr,
    sums_ptr,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BY_MASS: tl.constexpr,
):
    """Find the bucket in which the sum from the top reaches what is wanted."""
    row = tl.program_id(0).to(tl.int64)
    if _is_off(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BY_MASS):
        return
    k, p = _limits(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size)
    bucket = tl.arange(0, 1024)
    sums = tl.load(sums_ptr + row * 1024 + bucket)
    wanted = k.to(tl.float64)
    if BY_MASS:
        wanted = p.to(tl.float64) * tl.sum(sums, axis=0).to(tl.float64)
    short = tl.cumsum(sums, axis=0).to(tl.float64) < wanted
    edge = tl.minimum(tl.sum(short.to(tl.int32), axis=0), 1023)
    tl.store(edge_bucket_ptr + row, edge)
    tl.store(above_ptr + row, tl.sum(tl.where(bucket < edge, sums, 0), axis=0))
    tl.store(wanted_ptr + row, wanted)


@triton.jit
def _collect_kernel(
    collected_ptr,
    max_collected,
    num_collected_ptr,
    edge_bucket_ptr,
    top_key_ptr,
    threshold_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the edge bucket's logits to the row's scratch, in any order, as far as they fit."""
    row = tl.program_id(0).to(tl.int64)
    if _is_off(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BY_MASS):
        return
    top = _top_of(top_key_ptr, row)
    lowest = tl.load(threshold_ptr + row)
    edge = tl.load(edge_bucket_ptr + row)
    at = tl.arange(0, BLOCK)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        inside = at < vocab_size - start
        logits = _clean(tl.load(logits_ptr + row * logits_stride + start + at, mask=inside, other=float("-inf")))
        chosen = inside & (logits >= lowest) & (_bucket(logits, top) == edge)
        count = tl.sum(chosen.to(tl.int32), axis=0)
        if count > 0:
            place = tl.atomic_add(num_collected_ptr + row, count) + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(collected_ptr + row * max_collected + place, logits, mask=chosen & (place < max_collected))


@triton.jit
def _edge_kernel(
    threshold_ptr,
    collected_ptr,
    max_collected,
    num_collected_ptr,
    edge_bucket_ptr,
    above_ptr,
    wanted_ptr,
    top_key_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search the edge bucket for the threshold by halving the range of keys until no logit is left inside it."""
    row = tl.program_id(0).to(tl.int64)
    if _is_off(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size, BY_MASS):
        return
    top = _top_of(top_key_ptr, row)
    lowest = tl.load(threshold_ptr + row)
    edge = tl.load(edge_bucket_ptr + row)
    above = tl.load(above_ptr + row)
    wanted = tl.load(wanted_ptr + row)
    left = tl.load(num_collected_ptr + row)
    fits = left <= max_collected
    source = tl.where(fits, collected_ptr + row * max_collected, logits_ptr + row * logits_stride)
    length = tl.where(fits, left, vocab_size)
    at = tl.arange(0, BLOCK)

    # The smallest and largest key present bound the range, [low, high], in int64 so that no sum of two wraps.
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    largest = tl.full([BLOCK], -0x80000000, tl.int32)
    for start in range(0, length, BLOCK):
        inside = at < length - start
        logits = _clean(tl.load(source + start + at, mask=inside, other=float("-inf")))
        chosen = inside & (logits >= lowest) & (_bucket(logits, top) == edge)
        smallest = tl.minimum(smallest, tl.where(chosen, _key(logits), 0x7FFFFFFF))
        largest = tl.maximum(largest, tl.where(chosen, _key(logits), -0x80000000))
    low = tl.min(smallest, axis=0).to(tl.int64)
    high = tl.max(largest, axis=0).to(tl.int64)
    if left == 0:
        return
    while (low < high) & (left > 0):
        middle = low + (high - low) // 2
        units = tl.zeros([BLOCK], tl.int64)
        left_below = tl.zeros([BLOCK], tl.int32)
        left_above = tl.zeros([BLOCK], tl.int32)
        for start in range(0, length, BLOCK):
            inside = at < length - start
            logits = _clean(tl.load(source + start + at, mask=inside, other=float("-inf")))
            chosen = inside & (logits >= lowest) & (_bucket(logits, top) == edge)
            key = _key(logits).to(tl.int64)
            if BY_MASS:
                units += tl.where(chosen & (key > middle), _weight(logits, top), 0)
            else:
                units += (chosen & (key > middle)).to(tl.int64)
            left_below += (chosen & (key >= low) & (key < middle)).to(tl.int32)
            left_above += (chosen & (key > middle) & (key < high)).to(tl.int32)
        if (above + tl.sum(units, axis=0)).to(tl.float64) < wanted:
            high = middle
            left = tl.sum(left_below, axis=0)
        else:
            low = middle + 1
            left = tl.sum(left_above, axis=0)
    tl.store(threshold_ptr + row, _value(high.to(tl.int32)))


@triton.jit
def _remove_kernel(
    logits_ptr,
    logits_stride,
    threshold_ptr,
    row_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p = _limits(row, row_slots_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if (k == 0) & (p >= 1.0):
        return
    threshold = tl.load(threshold_ptr + row)
    at = tl.arange(0, BLOCK)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        inside = at < vocab_size - start
        target = logits_ptr + row * logits_stride + start + at
        logits = tl.load(target, mask=inside, other=0.0)
        removed = (logits >= threshold) == 0  # true for NaN
        tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & removed)


def apply_top_k_top_p_triton(
    logits: torch.Tensor, row_slots: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Do what `apply_top_k_top_p` does, several programs a row; never synchronises."""
    num_rows, vocab = logits.shape
    if not logits.numel():
        return
    device, row_of = logits.device, (logits, logits.stride(0))
    limits = (row_slots, top_k, top_p, vocab)
    top_key = torch.full((num_rows,), -(2**31), dtype=torch.int32, device=device)
    threshold = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
    # By filter: a kernel that cleared for the next would race with its own other warps' reads.
    sums = torch.zeros((2, num_rows, _NUM_BUCKETS), dtype=torch.int64, device=device)
    num_collected = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
    edge_bucket = torch.empty(num_rows, dtype=torch.int32, device=device)
    above = torch.empty(num_rows, dtype=torch.int64, device=device)
    wanted = torch.empty(num_rows, dtype=torch.float64, device=device)
    collected = torch.empty((num_rows, min(vocab, _MAX_COLLECTED)), dtype=torch.float32, device=device)

    row, split = (num_rows,), (num_rows, max(1, min(triton.cdiv(vocab, _BLOCK), _PROGRAMS // num_rows)))
    _top_kernel[split](top_key, *row_of, *limits, BLOCK=_BLOCK)
    for by_mass in (False, True):
        scratch = (collected, collected.shape[1], num_collected[int(by_mass)], edge_bucket)
        of_filter = sums[int(by_mass)]
        _histogram_kernel[split](of_filter, top_key, threshold, *row_of, *limits, BY_MASS=by_mass, BLOCK=_BLOCK)
        _bucket_kernel[row](edge_bucket, above, wanted, of_filter, *limits, BY_MASS=by_mass)
        _collect_kernel[split](*scratch, top_key, threshold, *row_of, *limits, BY_MASS=by_mass, BLOCK=_BLOCK)
        _edge_kernel[row](
            threshold, *scratch, above, wanted, top_key, *row_of, *limits, BY_MASS=by_mass, BLOCK=_BLOCK // 4
        )
    _remove_kernel[split](*row_of, threshold, *limits, BLOCK=_BLOCK)
