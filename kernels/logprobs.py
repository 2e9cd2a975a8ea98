"""The log-probability of a row's token and of its likeliest tokens.

Knows: one row's logits and how many tokens it wants. Doesn't know what was done to the logits: the caller hands in
those of the model or those that a token was drawn from.
"""

from typing import NamedTuple

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

MAX_TOP = 20
_ONE = 2.0**35  # the weight of the row's largest logit in the twin's sums, which are of integers and have no order
_BLOCK = 1024


class Logprobs(NamedTuple):
    """`token [N] float32`; `top_ids [N, MAX_TOP] int32` and `top [N, MAX_TOP] float32`, the likeliest first.

    What a row does not want is undefined.
    """

    token: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> "Logprobs":
        """Room for so many rows."""
        return Logprobs(
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(num_rows, MAX_TOP, dtype=torch.int32, device=device),
            torch.empty(num_rows, MAX_TOP, dtype=torch.float32, device=device),
        )


def gather_logprobs(
    logits: torch.Tensor, row_slots: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor, out: Logprobs
) -> None:
    """Each row of `logits [N, V] float32` whose slot wants it gets its entries of `out` written.

    `row_slots [N] int32` (-1 = padded), `token_ids [N] int64`, the row's token, `num_top [R] int32`: how many of the
    likeliest tokens (0 to MAX_TOP; equals in the order of ids), -1 = nothing at all. A log-probability is logit - top -
    log(sum(exp(logit - top))): -inf for what was removed, NaN for every token of a row that holds a NaN or +inf, or
    nothing but -inf. Where fewer than `num_top` tokens are above -inf, the rest has the id -1.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_rows = logits.shape[0]
    check("logits", logits, torch.float32, num_rows, None)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("token_ids", token_ids, torch.int64, num_rows)
    check("num_top", num_top, torch.int32, None)
    check("out.token", out.token, torch.float32, num_rows)
    check("out.top_ids", out.top_ids, torch.int32, num_rows, MAX_TOP)
    check("out.top", out.top, torch.float32, num_rows, MAX_TOP)
    check_same_device(logits=logits, row_slots=row_slots, token_ids=token_ids, num_top=num_top, out=out.token)
    op = gather_logprobs_triton if logits.is_cuda else gather_logprobs_torch
    op(logits, row_slots, token_ids, num_top, out)


def gather_logprobs_torch(
    logits: torch.Tensor, row_slots: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor, out: Logprobs
) -> None:
    """Do what `gather_logprobs` does, a row at a time."""
    tokens = token_ids.tolist()
    for row, slot in enumerate(row_slots.tolist()):
        wanted = int(num_top[slot]) if slot >= 0 else -1
        if wanted < 0:
            continue
        values = logits[row]
        top = values.max()
        units = (values - top).double().exp_().mul_(_ONE).round_()
        if bool(units.isnan().any()):
            out.token[row], out.top[row, :wanted], out.top_ids[row, :wanted] = torch.nan, torch.nan, -1
            continue
        scale = float(np.log(float(units.long().sum()) / _ONE))
        out.token[row] = float(values[tokens[row]].double() - top.double()) - scale
        if wanted == 0:
            continue
        count = min(wanted, len(values))
        edge = values.topk(count).values[-1]
        ids = (values >= edge).nonzero().flatten()
        order = np.lexsort((ids.numpy(), -values[ids].numpy()))[:count]
        best = ids[torch.from_numpy(order)]
        out.top[row, :wanted], out.top_ids[row, :wanted] = -torch.inf, -1
        out.top[row, :count] = (values[best].double() - top.double() - scale).float()
        out.top_ids[row, :count] = torch.where(values[best] > -torch.inf, best, -1).int()


@triton.jit
def _logprobs_kernel(
    token_ptr,
    top_ids_ptr,
    top_ptr,
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    token_ids_ptr,
    num_top_ptr,
    vocab_size,
    num_blocks,
    MAX_TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    wanted = tl.load(num_top_ptr + slot)
    if wanted < 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    at = tl.arange(0, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    # the best of each block stays here, so that a pick reads only the block that it came from again
    best = tl.full([BLOCKS], float("-inf"), tl.float32)
    odd = tl.zeros([BLOCK], tl.int32)
    for block in range(num_blocks):
        inside = at < vocab_size - block * BLOCK
        logits = tl.load(row_ptr + block * BLOCK + at, mask=inside, other=float("-inf"))
        odd += ((logits != logits) | (logits == float("inf"))).to(tl.int32)
        best = tl.where(blocks == block, tl.max(logits, axis=0), best)
    top = tl.max(best, axis=0)
    bad = (tl.sum(odd, axis=0) > 0) | (top == float("-inf"))
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(num_blocks):
        inside = at < vocab_size - block * BLOCK
        sums += tl.exp(tl.load(row_ptr + block * BLOCK + at, mask=inside, other=float("-inf")) - top)
    scale = tl.log(tl.sum(sums, axis=0))
    token = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    tl.store(token_ptr + row, tl.where(bad, float("nan"), token - top - scale))
    if bad:
        for i in range(wanted):
            tl.store(top_ids_ptr + row * MAX_TOP + i, -1)
            tl.store(top_ptr + row * MAX_TOP + i, float("nan"))
        return
    # Picks in the order of (logit down, id up): the next is the best behind the last. Among equals the lowest block
    # goes first, so that whatever equals the last pick in the picked block and lies behind it was not picked yet.
    last = top
    last_id = tl.full([], -1, tl.int32)
    for i in range(wanted):
        value = tl.max(best, axis=0)
        block = tl.argmax(best, axis=0)
        start = block * BLOCK
        inside = at < vocab_size - start
        logits = tl.load(row_ptr + start + at, mask=inside, other=float("-inf"))
        left = inside & ((logits < last) | ((logits == last) & (start + at > last_id)))
        winner = tl.min(tl.where(left & (logits == value), at, BLOCK), axis=0)
        removed = value == float("-inf")
        tl.store(top_ptr + row * MAX_TOP + i, value - top - scale)
        tl.store(top_ids_ptr + row * MAX_TOP + i, tl.where(removed, -1, start + winner).to(tl.int32))
        behind = inside & ((logits < value) | ((logits == value) & (at > winner)))
        best = tl.where(blocks == block, tl.max(tl.where(behind, logits, float("-inf")), axis=0), best)
        last = value
        last_id = (start + winner).to(tl.int32)


def gather_logprobs_triton(
    logits: torch.Tensor, row_slots: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor, out: Logprobs
) -> None:
    """Do what `gather_logprobs` does, by one program a row."""
    num_rows, vocab = logits.shape
    if not logits.numel():
        return
    num_blocks = triton.cdiv(vocab, _BLOCK)
    _logprobs_kernel[(num_rows,)](
        *out,
        logits,
        logits.stride(0),
        row_slots,
        token_ids,
        num_top,
        vocab,
        num_blocks,
        MAX_TOP=MAX_TOP,
        BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=_BLOCK,
    )
