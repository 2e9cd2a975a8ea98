"""The kernels that go through all logits: the pass that draws or collects, what filters remove, and a row's best part.

Knows: processed logits, the draw, which rows are cut off by a filter. Doesn't know how filters find their threshold
(`_filter_rows.py`), nor the rules that act on a few tokens of a row, which `sample_tokens.py` runs before.
"""

# mypy: ignore-errors

from specgen.kernels._draw import _any, _draw, _load_block, _marks, _places, _row_best, _store_block
from specgen.kernels._filter_rows import _collect
from specgen.kernels._processed import _block_tokens, _processed, _row_terms, _undivided
from specgen.kernels._row_thresholds import _is_kept, _limits
from specgen.kernels._triton import tl, triton


@triton.jit
def _has_nan(raw):
    """1 if a block of logits holds a NaN, else 0."""
    odd = tl.zeros([], tl.int32)
    suspect = tl.sum(tl.sum(raw * 0.0, axis=2), axis=0)  # NaN from NaN and infinities
    if _any((suspect != suspect).to(tl.int32)):
        odd = tl.max(tl.max(tl.max((raw != raw).to(tl.int32), axis=2), axis=0), axis=0)
    return odd


@triton.jit
def _pass_kernel(
    best_ptr,
    best_id_ptr,
    has_nan_ptr,
    columns_ptr,
    count_ptr,
    floor_ptr,
    t,
    sharpness,
    span,
    RULES: tl.constexpr,
    PENALTIES: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    FILTERS: tl.constexpr,
    KEEP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    if slot < 0:
        return
    seed = tl.load(t.seeds + slot)
    position = tl.load(t.positions + row)
    terms = _row_terms(t, row, slot, RULES, PENALTIES, NOISE)
    scale = 1.0 / terms[8]
    is_random = NOISE
    if NOISE:
        is_random = tl.load(t.temperature + slot) > 0.0
    is_filtered = FILTERS  # what no row of the call needs isn't compiled
    floor = tl.full([], float("-inf"), tl.float32)
    if FILTERS:
        is_filtered = _limits(t, slot)[4]
        floor = tl.load(floor_ptr + row, mask=is_filtered, other=0.0)
        floor = floor - 1e-6 * tl.minimum(tl.abs(floor), 1e30) - 1e-30  # rough logits are a little off
    if KEEP:
        scale = tl.full([], 1.0, tl.float32)
    row_ptr = t.logits + row * t.logits_stride
    args = (t, row, slot, terms, RULES, PENALTIES, HAS_EXTRA, KEEP)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    odd = tl.zeros([], tl.int32)
    for start in range(part * span, tl.minimum((part + 1) * span, t.num_columns), BLOCK):
        logits = _load_block(row_ptr, start, t.num_columns, float("-inf"), LANES, BLOCK)
        token = _block_tokens(start, t, HAS_EXTRA, LANES, BLOCK)
        odd = tl.maximum(odd, _has_nan(logits))
        logits = _undivided(logits, start, token, t, slot, terms, KEEP, RULES, PENALTIES, HAS_EXTRA, LANES, BLOCK)
        if KEEP:
            logits = tl.div_rn(logits, terms[8])
            _store_block(row_ptr, logits, start, t.num_columns, LANES, BLOCK)
            tl.debug_barrier()  # single ones are read again
        if is_filtered:
            _quad, _of_four, own = _places(start, LANES, BLOCK)
            marks = _marks((logits * scale >= floor) & (logits > float("-inf")), own)
            _collect(columns_ptr + row * MAX_COLLECTED, count_ptr + row, marks, start, LANES, MAX_COLLECTED)
        else:
            best, best_id = _draw(
                best,
                best_id,
                logits,
                token,
                scale,
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
    out = row * tl.num_programs(1) + part
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, best_id)
    tl.store(has_nan_ptr + out, odd.to(tl.int8))


@triton.jit
def _remove_kernel(threshold_ptr, typical_ptr, t, TYPICAL: tl.constexpr, BLOCK: tl.constexpr):
    """What the filters remove becomes -inf."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(t.row_slots + row).to(tl.int64)
    if _limits(t, slot)[4] == 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < t.num_columns
    at = t.logits + row * t.logits_stride + column
    threshold = tl.load(threshold_ptr + row)
    top = threshold
    mean = threshold
    last = threshold
    if TYPICAL:
        top = tl.load(typical_ptr + row * 3)
        mean = tl.load(typical_ptr + row * 3 + 1)
        last = tl.load(typical_ptr + row * 3 + 2)
    removed = _is_kept(tl.load(at, mask=inside, other=0.0), threshold, top, mean, last, TYPICAL) == 0
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & removed)


@triton.jit(do_not_specialize=["num_parts"])
def _join_kernel(
    out_ptr, has_nan_ptr, best_ptr, best_id_ptr, part_nan_ptr, row_slots_ptr, num_parts, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_slots_ptr + row) < 0:
        tl.store(out_ptr + row, 0)
        tl.store(has_nan_ptr + row, False)
        return
    tl.store(out_ptr + row, _row_best(best_ptr, best_id_ptr, row, num_parts, PARTS))
    part = tl.arange(0, PARTS)
    odd = tl.load(part_nan_ptr + row * num_parts + part, mask=part < num_parts, other=0)
    tl.store(has_nan_ptr + row, tl.max(odd.to(tl.int32), axis=0) > 0)
