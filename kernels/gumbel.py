"""Draws one token a row by the Gumbel-max rule, from noise that is a pure function of (seed, position, token id).

Knows: logits that are processed and divided by the temperature, and how noise is keyed. Doesn't know requests,
filters or drafts: target and drafter call the same function with the same key, which is what makes their picks agree.

Noise: h = MurmurHash3 x86-32 of the words (seed low, seed high, position low, token id), state 0 at the start;
u = (h + 0.5) / 2^32; g = -log(-log(1 - u)). The twin evaluates g in float64 and rounds to float32; the kernel works in
float32 and agrees to 4e-6 (absolute), so that kernel and twin can pick differently only where two scores nearly tie.
"""

from functools import lru_cache

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._draw import BLOCK, DRAW_OPTIONS, LANES, _draw, _load_block, _places, _row_best, draw_grid
from specgen.kernels._triton import tl, triton

# g lies in [-3.14, 22.88]: a logit further than this below the row's largest can't win.
_NOISE_SPAN = 26.1
_CHUNK_ELEMENTS = 1 << 18  # working set of the twin: three 1 MB buffers stay in the second-level cache
_LN2 = 0.6931471805599453


def gumbel_sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """Return each row's argmax of logits * sharpness + g(seed, position, token); ties go to the lowest id.

    `logits [N, V] float32` (processed, divided by T), `row_slots [N] int32` (-1 = padded: gives 0), `positions [N]
    int64` (of the row's input token), `seeds [R] int64`, `temperature [R] float32` (0 = plain argmax). NaN counts as
    -inf; a row with no finite logit gives 0. Result `[N] int64`. Raises: ValueError on a wrong dtype, shape or
    layout.
    Source: Maddison et al., arXiv 1411.0030 (Gumbel-max).
    """
    num_rows = logits.shape[0]
    check("logits", logits, torch.float32, num_rows, None)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("positions", positions, torch.int64, num_rows)
    check("seeds", seeds, torch.int64, None)
    check("temperature", temperature, torch.float32, seeds.shape[0])
    check_same_device(logits=logits, row_slots=row_slots, positions=positions, seeds=seeds, temperature=temperature)
    op = gumbel_sample_triton if logits.is_cuda else gumbel_sample_torch
    return op(logits, row_slots, positions, seeds, temperature, sharpness)


# --- twin -------------------------------------------------------------------------------------------------------------


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise of whole rows, `[N, vocab_size] float32`, for `seeds [N] int64` and `positions [N] int64`."""
    state = _key_state(seeds, positions)[:, None].expand(-1, vocab_size).contiguous()
    words = _token_words(vocab_size)
    return _gumbel(_finish(state ^ words, torch.empty_like(state)))


def gumbel_sample_torch(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """Return what `gumbel_sample` returns, by torch operations; may look at values."""
    num_rows, vocab = logits.shape
    slots = row_slots.long().clamp(min=0)
    live = row_slots >= 0
    random = live & (temperature[slots] > 0)
    out = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    greedy_rows, random_rows = (live & ~random).nonzero().flatten(), random.nonzero().flatten()
    if greedy_rows.numel():
        out[greedy_rows] = _argmax(_take_rows(logits, greedy_rows))
    state = _key_state(seeds[slots], positions)
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, random_rows.numel(), step):
        rows = random_rows[start : start + step]
        taken = _take_rows(logits, rows)
        out[rows] = _sample_rows(taken if sharpness == 1.0 else taken * sharpness, state[rows])
    return out


def _take_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `logits[rows]` (ascending rows), a view where the rows are adjacent."""
    first, count = int(rows[0]), rows.numel()
    if int(rows[-1]) - first == count - 1:
        return logits[first : first + count]
    return logits[rows]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    best, ids = logits.max(dim=1)  # the first of equal maxima; NaN wins
    if bool(best.isnan().any()):
        ids = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(dim=1)
    return ids


def _sample_rows(logits: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel-max token of each row: find the few tokens that could win, then score those exactly."""
    vocab = logits.shape[1]
    top = logits.amax(dim=1, keepdim=True)
    if bool(top.isnan().any()):
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        top = logits.amax(dim=1, keepdim=True)
    in_reach = logits >= top - _NOISE_SPAN
    words = _token_words(vocab)
    if int(torch.count_nonzero(in_reach)) * 16 > logits.numel():
        in_reach = _could_win(logits, state, words)
    rows, ids = in_reach.nonzero(as_tuple=True)
    hashed = _finish(state[rows] ^ words[ids], torch.empty(rows.shape, dtype=torch.int32, device=rows.device))
    scores = logits[rows, ids] + _gumbel(hashed)
    best = torch.full((logits.shape[0],), -torch.inf, device=logits.device)
    best.scatter_reduce_(0, rows, scores, "amax")
    won = torch.where(scores == best[rows], ids, vocab)
    winners = torch.full((logits.shape[0],), vocab, device=logits.device).scatter_reduce_(0, rows, won, "amin")
    return torch.where(top.flatten() > -torch.inf, winners, 0)


def _could_win(logits: torch.Tensor, state: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return a mask `[rows, V]` that holds every row's winner and, for speed, little else.

    g <= -log(u), and -log2(u) is at most the straight line through its value at the powers of two, which is the
    exponent and mantissa bits of u read as one integer: no logarithm. A token whose score under that ceiling stays
    below the exact score of the token with the highest ceiling has lost.
    """
    hashed = _finish(state[:, None] ^ words, scratch := torch.empty(logits.shape, dtype=torch.int32))
    half = torch.bitwise_right_shift(hashed, 1, out=scratch).bitwise_and_(0x7FFFFFFF)
    ceiling = torch.empty(logits.shape, dtype=torch.float32).copy_(half)
    bits = scratch.view(torch.float32).copy_(ceiling.view(torch.int32))
    # -log(u) <= 158 ln 2 - bits ln 2 / 2^23, with u >= half / 2^31
    ceiling = torch.add(logits, bits, alpha=-_LN2 / 2**23, out=ceiling)
    favourite = ceiling.argmax(dim=1, keepdim=True)
    reached = logits.gather(1, favourite) + _gumbel(hashed.gather(1, favourite))
    slack = 1e-3 + 1e-6 * reached.abs()  # covers every rounding above
    return ceiling >= torch.where(reached.isfinite(), reached - 158 * _LN2 - slack, reached)


# Words of the hash are kept as int32: torch wraps products and sums as the hash wants.
def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_C1, _C2 = _signed(0xCC9E2D51), _signed(0x1B873593)
_ADD = _signed(0xE6546B64)
_F1, _F2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_NUM_BYTES = 16


def _rotate(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))


def _word(x: torch.Tensor) -> torch.Tensor:
    return _rotate(x * _C1, 15) * _C2


def _key_state(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the hash state after the words of seed and position, `[N] int32`."""
    state = torch.zeros(seeds.shape, dtype=torch.int32, device=seeds.device)
    for word in (seeds.int(), (seeds >> 32).int(), positions.int()):
        state = _rotate(state ^ _word(word), 13) * 5 + _ADD
    return state


@lru_cache(maxsize=4)
def _token_words(vocab_size: int) -> torch.Tensor:
    return _word(torch.arange(vocab_size, dtype=torch.int32))


def _finish(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Turn `x` = state ^ mixed token word into the hash, in place; `scratch` is a buffer of its size."""
    torch.bitwise_right_shift(x, 19, out=scratch).bitwise_and_(0x1FFF)
    x.bitwise_left_shift_(13).bitwise_or_(scratch).mul_(5).add_(_ADD).bitwise_xor_(_NUM_BYTES)
    for shift, factor in ((16, _F1), (13, _F2)):
        torch.bitwise_right_shift(x, shift, out=scratch).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(scratch).mul_(factor)
    torch.bitwise_right_shift(x, 16, out=scratch).bitwise_and_(0xFFFF)
    return x.bitwise_xor_(scratch)


def _gumbel(hashed: torch.Tensor) -> torch.Tensor:
    """Return g of hashes `int32` as float32; float64 inside, so that a library's last bit can't show in the result."""
    unsigned = hashed.double()
    u = (torch.where(hashed < 0, unsigned + 2.0**32, unsigned) + 0.5) * 2.0**-32
    return torch.log1p(u.neg_()).neg_().log_().neg_().float()


# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _stored_logits(token, mask, args):
    return tl.load(args + token, mask=mask, other=float("-inf")), token


@triton.jit
def _part_best_kernel(
    best_ptr,
    best_id_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    sharpness,
    vocab_size,
    span,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(positions_ptr + row)
    is_random = tl.load(temperature_ptr + slot) > 0.0
    row_ptr = logits_ptr + row * logits_stride
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(part * span, tl.minimum((part + 1) * span, vocab_size), BLOCK):
        logits = _load_block(row_ptr, start, vocab_size, float("-inf"), LANES, BLOCK)
        quad, of_four, _own = _places(start, LANES, BLOCK)
        best, best_id = _draw(
            best,
            best_id,
            logits,
            quad + of_four,
            1.0,
            start,
            seed,
            position,
            is_random,
            sharpness,
            _stored_logits,
            row_ptr,
            LANES,
            BLOCK,
        )
    out = row * tl.num_programs(1) + part
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, best_id)


@triton.jit(do_not_specialize=["num_parts"])
def _row_best_kernel(out_ptr, best_ptr, best_id_ptr, row_slots_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_slots_ptr + row) < 0:
        tl.store(out_ptr + row, 0)
        return
    tl.store(out_ptr + row, _row_best(best_ptr, best_id_ptr, row, num_parts, PARTS))


def gumbel_sample_triton(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """Return what `gumbel_sample` returns, by a (rows x parts) grid and a reduction over parts."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_parts, span = draw_grid(num_rows, vocab)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _part_best_kernel[(num_rows, num_parts)](
        best,
        best_id,
        logits,
        logits.stride(0),
        row_slots,
        positions,
        seeds,
        temperature,
        sharpness,
        vocab,
        span,
        LANES=LANES,
        BLOCK=BLOCK,
        **DRAW_OPTIONS,
    )
    parts = triton.next_power_of_2(num_parts)
    _row_best_kernel[(num_rows,)](out, best, best_id, row_slots, num_parts, PARTS=parts, num_warps=1)
    return out
