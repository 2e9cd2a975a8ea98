"""The draw on the device: noise, blocks of a row, and the best score among what could win.

Knows: scores, how noise is keyed (see `gumbel.py`), how one warp goes through a row. Doesn't know where logits come
from: whoever draws says how exact ones are got.
"""

# mypy: ignore-errors

from specgen.kernels._triton import tl, triton

# A program is one warp, so that nothing waits for anything else, and goes through blocks of 32 logits a lane. Without
# fused multiply-adds but those written: a row's bits do not depend on what else was compiled into a kernel.
LANES, BLOCK = 32, 1024
DRAW_OPTIONS = {"num_warps": LANES // 32, "enable_fp_fusion": False}
_PROGRAMS = 8192  # keep a GPU busy for two or three rounds
_MAX_BLOCKS = 8  # of a program: what it has seen before spares it most of the exact scores


def draw_grid(num_rows: int, vocab: int) -> tuple[int, int]:
    """Return how many programs share a row, and how many tokens each goes through; no row's result depends on it."""
    num_blocks = triton.cdiv(vocab, BLOCK)
    blocks = min(max(num_rows * num_blocks // _PROGRAMS, 1), _MAX_BLOCKS)
    return triton.cdiv(num_blocks, blocks), blocks * BLOCK


@triton.jit
def _rotate_word(x, BY: tl.constexpr):
    return (x << BY) | (x >> (32 - BY))


@triton.jit
def _mix_word(state, word):
    word = _rotate_word(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate_word(state ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def _hash_of(seed, position, token):
    """The hash of (seed, position, token) for int64 scalars and a block of ids."""
    state = _mix_word((seed * 0).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _mix_word(state, token.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def _gumbel_of(seed, position, token):
    """g(seed, position, token) for int64 scalars and a block of ids."""
    state = _hash_of(seed, position, token)
    # From 16-bit halves: float32 then holds u, and 1 - u, to its full relative precision at both ends.
    high = (state >> 16).to(tl.float32)
    low = (state & 0xFFFF).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    rest = (65535.0 - high) * 1.52587890625e-05 + (65535.5 - low) * 2.3283064365386963e-10
    # -log(1 - u) = u + u^2/2 + ... ; ten terms leave 1e-7 of it below u = 1/4.
    series = u * 0.1 + 0.1111111111
    series = series * u + 0.125
    series = series * u + 0.1428571429
    series = series * u + 0.1666666667
    series = series * u + 0.2
    series = series * u + 0.25
    series = series * u + 0.3333333333
    series = series * u + 0.5
    series = (series * u + 1.0) * u
    return -tl.log(tl.where(u < 0.25, series, -tl.log(rest)))


@triton.jit
def _places(start, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a block that begins at `start`, in parts to add up: the first of each four, and which of the four;
    and the number of each column among its lane's own, 0 to 31, a constant of the program wherever it is used.
    """
    turn = tl.arange(0, BLOCK // 4 // LANES)[:, None, None]
    of_four = tl.arange(0, 4)[None, None, :]
    first = start + tl.arange(0, LANES) * 4
    return first[None, :, None] + turn * (4 * LANES), of_four, turn * 4 + of_four


@triton.jit
def _load_block(row_ptr, start, vocab_size, other, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row, shaped like its places: each lane has four neighbours at a time."""
    turn = tl.arange(0, BLOCK // 4 // LANES)[:, None]
    token = start + turn * (4 * LANES) + tl.arange(0, 4 * LANES)[None, :]
    if start + BLOCK <= vocab_size:
        values = tl.load(row_ptr + token)
    else:
        values = tl.load(row_ptr + token, mask=token < vocab_size, other=other)
    return tl.reshape(values, [BLOCK // 4 // LANES, LANES, 4])


@triton.jit
def _store_block(row_ptr, values, start, vocab_size, LANES: tl.constexpr, BLOCK: tl.constexpr):
    turn = tl.arange(0, BLOCK // 4 // LANES)[:, None]
    token = start + turn * (4 * LANES) + tl.arange(0, 4 * LANES)[None, :]
    values = tl.reshape(values, [BLOCK // 4 // LANES, 4 * LANES])
    tl.store(row_ptr + token, values, mask=token < vocab_size)


@triton.jit
def _marks(chosen, own):
    """A word a lane, with bit i set where the lane's own number i is chosen."""
    return tl.sum(tl.sum(tl.where(chosen, 1 << own, 0), axis=2), axis=0)


@triton.jit
def _lowest_mark(marks, LANES: tl.constexpr):
    """The place in the block of each lane's lowest mark (there must be one)."""
    power = (marks & -marks).to(tl.uint32, bitcast=True).to(tl.float32)  # exact: its exponent is the bit's number
    own = (power.to(tl.int32, bitcast=True) >> 23) - 127
    return ((own // 4) * LANES + tl.arange(0, LANES)) * 4 + own % 4


@triton.jit
def _any(marks):
    return tl.max((marks != 0).to(tl.int32), axis=0) > 0


@triton.jit
def _score_marked(
    best, best_id, marks, start, seed, position, is_random, sharpness, LOGITS: tl.constexpr, args, LANES: tl.constexpr
):
    """The best score, and its lowest id, of what gave `best` and of each lane's lowest mark."""
    has = marks != 0
    score, token = LOGITS(start + _lowest_mark(marks, LANES), has, args)
    if is_random:
        score = score * sharpness + _gumbel_of(seed, position, token)
    score = tl.where(has & (score == score), score, float("-inf"))
    highest = tl.max(score, axis=0)
    if highest >= best:
        winner = tl.min(tl.where(has & (score == highest), token, 0x7FFFFFFF), axis=0)
        best_id = tl.where((highest > best) | (winner < best_id), winner, best_id)
        best = highest
    return best, best_id


@triton.jit
def _draw(
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
    LOGITS: tl.constexpr,
    args,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score, and its lowest id, of what gave `best` and of the block that begins at column `start`.

    `logits * scale` are the processed logits of the block's `token`s, roughly. `LOGITS(column, mask, args)` gives exact
    ones of single columns, and their tokens, and they are scored exactly: one of each lane at a time, and only those
    that could win. g <= -log(u) is at most a straight line in the exponent and mantissa bits of u, read as one integer
    (see `_could_win`): a token whose score under that ceiling stays below the best has lost; -inf has anyway. With no
    best yet, each lane's highest ceiling is scored.
    """
    _quad, _of_four, own = _places(start, LANES, BLOCK)
    ceiling = logits * scale
    above = 0.0
    if is_random:
        bits = _hash_of(seed, position, token).to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
        # -log(u) <= 159 ln 2 - bits ln 2 / 2^23
        ceiling = tl.fma(bits, -8.262958288192749e-08, logits * (scale * sharpness))
        above = 110.21040
    if best == float("-inf"):
        highest = tl.max(tl.max(ceiling, axis=2), axis=0)
        marks = _marks((ceiling == highest[None, :, None]) & (ceiling > float("-inf")), own)
        best, best_id = _score_marked(
            best, best_id, marks, start, seed, position, is_random, sharpness, LOGITS, args, LANES
        )
    # the slack covers every rounding
    marks = _marks(ceiling > best - (1e-3 + 1e-6 * tl.minimum(tl.abs(best), 1e30)) - above, own)
    while _any(marks):
        best, best_id = _score_marked(
            best, best_id, marks, start, seed, position, is_random, sharpness, LOGITS, args, LANES
        )
        marks = marks & (marks - 1)
    return best, best_id


@triton.jit
def _row_best(best_ptr, best_id_ptr, row, num_parts, PARTS: tl.constexpr):
    """The id of the best score of a row's parts, 0 if there is none. Parts are in order of ids."""
    part = tl.arange(0, PARTS)
    best = tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    token = tl.load(best_id_ptr + row * num_parts + tl.argmax(best, axis=0))
    return tl.where(tl.max(best, axis=0) == float("-inf"), 0, token).to(tl.int64)
