"""Removes the tokens that would repeat a sequence of n tokens, exact under speculation.

Knows: a request's committed tokens, prompt included, the drafts in front of a logits row, and its n. A row that judges
the draft after drafts 1..j looks at the committed tokens followed by those j drafts: the row is only used if they were
accepted, so the result is what plain decoding computes there.

    text  . . a b c . . . . a b |     n = 3: the last two tokens are a b, which c followed before: c is removed
"""

from typing import Any

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 1024


def apply_no_repeat_ngram(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    ngram_size: torch.Tensor,
) -> None:
    """In each row of `logits [N, V] float32`, the tokens that would complete a sequence of `ngram_size[slot]` tokens
    which the row's text has already become -inf. In place.

    The text is `token_ids[slot, : total_len[slot]]` and then `spec_ids[spec_start[n] : spec_start[n] + spec_count[n]]`.
    Nothing is removed while the text is shorter than n. `row_slots [N] int32` (-1 = padded: untouched), `spec_ids [M]
    int64`, `spec_start`, `spec_count [N] int32`, `token_ids [R, L] int32`, `total_len [R] int32`, `ngram_size [R]
    int32` (0 = off; 1 removes every token of the text). Ids outside the vocabulary have nothing to remove.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_rows, num_slots = logits.shape[0], total_len.shape[0]
    check("logits", logits, torch.float32, num_rows, None)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("spec_ids", spec_ids, torch.int64, None)
    check("spec_start", spec_start, torch.int32, num_rows)
    check("spec_count", spec_count, torch.int32, num_rows)
    check("token_ids", token_ids, torch.int32, num_slots, None)
    check("total_len", total_len, torch.int32, num_slots)
    check("ngram_size", ngram_size, torch.int32, num_slots)
    check_same_device(logits=logits, row_slots=row_slots, spec_ids=spec_ids, token_ids=token_ids, ngram_size=ngram_size)
    op: Any = apply_no_repeat_ngram_triton if logits.is_cuda else apply_no_repeat_ngram_torch
    op(
        logits,
        row_slots,
        spec_ids,
        spec_start,
        spec_count,
        token_ids=token_ids,
        total_len=total_len,
        ngram_size=ngram_size,
    )


def apply_no_repeat_ngram_torch(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    ngram_size: torch.Tensor,
) -> None:
    """Do what `apply_no_repeat_ngram` does, a row at a time."""
    rows = ((row_slots >= 0) & (ngram_size[row_slots.long().clamp(min=0)] > 0)).nonzero().flatten()
    for row in rows.tolist():
        slot, start = int(row_slots[row]), int(spec_start[row])
        drafts = spec_ids[start : start + int(spec_count[row])]
        text = torch.cat([token_ids[slot, : int(total_len[slot])].long(), drafts])
        before = int(ngram_size[slot]) - 1
        num_places = len(text) - before
        if num_places <= 0:
            continue
        matched = torch.ones(num_places, dtype=torch.bool)
        for i in range(before):
            matched &= text[i : i + num_places] == text[num_places + i]
        gone = text[before:][matched]
        logits[row, gone[(gone >= 0) & (gone < logits.shape[1])]] = -torch.inf


@triton.jit
def _token_at(at, mask, committed, token_ptr, spec_ptr):
    """Tokens of a row's text, committed ones and then drafts, as int64; `at` within the text where `mask` holds."""
    token = tl.load(token_ptr + at, mask=mask & (at < committed), other=-1).to(tl.int64)
    draft = tl.load(spec_ptr + (at - committed), mask=mask & (at >= committed), other=-1)
    return tl.where(at < committed, token, draft)


@triton.jit
def _no_repeat_ngram_kernel(
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    spec_ids_ptr,
    spec_start_ptr,
    spec_count_ptr,
    token_ids_ptr,
    token_ids_stride,
    total_len_ptr,
    ngram_size_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    before = tl.load(ngram_size_ptr + slot) - 1
    committed = tl.load(total_len_ptr + slot)
    num_places = committed + tl.load(spec_count_ptr + row) - before
    if (before < 0) | (tl.program_id(1) * BLOCK >= num_places):
        return
    token_ptr = token_ids_ptr + slot * token_ids_stride
    spec_ptr = spec_ids_ptr + tl.load(spec_start_ptr + row).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    matched = place < num_places
    for i in range(before):
        wanted = _token_at(num_places + i, num_places + i >= 0, committed, token_ptr, spec_ptr)
        matched = matched & (_token_at(place + i, matched, committed, token_ptr, spec_ptr) == wanted)
    gone = _token_at(place + before, matched, committed, token_ptr, spec_ptr)
    matched = matched & (gone >= 0) & (gone < vocab_size)
    removed = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + gone, removed, mask=matched)


def apply_no_repeat_ngram_triton(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    ngram_size: torch.Tensor,
) -> None:
    """Do what `apply_no_repeat_ngram` does, by a (rows x blocks of places) grid; it covers rows of any length."""
    if not logits.numel():
        return
    # a text has at most a draft for each logits row of the call behind its committed tokens
    longest = token_ids.shape[1] + spec_ids.shape[0]
    _no_repeat_ngram_kernel[(logits.shape[0], triton.cdiv(longest, _BLOCK))](
        logits,
        logits.stride(0),
        row_slots,
        spec_ids,
        spec_start,
        spec_count,
        token_ids,
        token_ids.stride(0),
        total_len,
        ngram_size,
        logits.shape[1],
        BLOCK=_BLOCK,
    )
