"""Removes the token that would complete a forbidden sequence of tokens, exact under speculation.

Knows: a request's committed tokens, prompt included, the drafts in front of a logits row, and its forbidden sequences
("words"). A row that judges the draft after drafts 1..j matches against the committed tokens followed by those j
drafts: the row is only used if they were accepted, so the result is what plain decoding computes there.

    committed 0 .. total_len | drafts 1 .. j |
                    [ a   b    c      d ]  x     the word a b c d x: x is removed
"""

from typing import Any

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 128


def apply_bad_words(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    bad_word_ids: torch.Tensor,
    bad_word_ends: torch.Tensor,
    num_bad_words: torch.Tensor,
) -> None:
    """In each row of `logits [N, V] float32`, the last token of every word of the row's slot whose other tokens are the
    last ones before the row becomes -inf. In place.

    The tokens before the row are `token_ids[slot, : total_len[slot]]` and then `spec_ids[spec_start[n] :
    spec_start[n] + spec_count[n]]` (ids < 0 match nothing). Word w of a slot is `bad_word_ids[slot, bad_word_ends[slot,
    w - 1] : bad_word_ends[slot, w]]` (the first from 0), at least one token; a word of one token is always removed, one
    that ends with an id outside the vocabulary has nothing to remove.
    `row_slots [N] int32` (-1 = padded: untouched), `spec_ids [M] int64`, `spec_start`, `spec_count [N] int32`,
    `token_ids [R, L] int32`, `total_len [R] int32`, `bad_word_ids [R, I]`, `bad_word_ends [R, W] int32`,
    `num_bad_words [R] int32` (0 = off).
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
    check("bad_word_ids", bad_word_ids, torch.int32, num_slots, None)
    check("bad_word_ends", bad_word_ends, torch.int32, num_slots, None)
    check("num_bad_words", num_bad_words, torch.int32, num_slots)
    check_same_device(logits=logits, row_slots=row_slots, spec_ids=spec_ids, token_ids=token_ids)
    op: Any = apply_bad_words_triton if logits.is_cuda else apply_bad_words_torch
    op(
        logits,
        row_slots,
        spec_ids,
        spec_start,
        spec_count,
        token_ids=token_ids,
        total_len=total_len,
        bad_word_ids=bad_word_ids,
        bad_word_ends=bad_word_ends,
        num_bad_words=num_bad_words,
    )


def apply_bad_words_torch(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    bad_word_ids: torch.Tensor,
    bad_word_ends: torch.Tensor,
    num_bad_words: torch.Tensor,
) -> None:
    """Do what `apply_bad_words` does, all words of all rows at once, one token back at a time."""
    rows = ((row_slots >= 0) & (num_bad_words[row_slots.long().clamp(min=0)] > 0)).nonzero().flatten()
    if not rows.numel():
        return
    slots = row_slots[rows].long()
    num_words, committed, drafts = num_bad_words[slots], total_len[slots], spec_count[rows]
    word = torch.arange(int(num_words.max()))
    matched = word < num_words[:, None]
    ends = torch.where(matched, bad_word_ends[slots, : len(word)], 1).long()
    prefix = ends - 1 - torch.cat([ends.new_zeros(len(rows), 1), ends[:, :-1]], dim=1)
    ids = bad_word_ids[slots, : int(ends.max())]
    last = ids.gather(1, ends - 1).long()
    matched &= (prefix <= (committed + drafts)[:, None]) & (last < logits.shape[1])
    padded_spec_ids = torch.cat([spec_ids, spec_ids.new_full((1,), -1)])
    for back in range(int(torch.where(matched, prefix, 0).max())):
        is_draft = back < drafts
        draft = padded_spec_ids[torch.where(is_draft, spec_start[rows] + drafts - 1 - back, -1)]
        token = torch.where(
            is_draft, draft, token_ids[slots, (committed + drafts - 1 - back).clamp(0, token_ids.shape[1] - 1)]
        )
        matched &= (back >= prefix) | (ids.gather(1, (ends - 2 - back).clamp(min=0)) == token[:, None])
    of_row, nth = matched.nonzero(as_tuple=True)
    logits[rows[of_row], last[of_row, nth]] = -torch.inf


@triton.jit
def _bad_words_kernel(
    logits_ptr,
    logits_stride,
    row_slots_ptr,
    spec_ids_ptr,
    spec_start_ptr,
    spec_count_ptr,
    token_ids_ptr,
    token_ids_stride,
    total_len_ptr,
    bad_word_ids_ptr,
    bad_word_ids_stride,
    bad_word_ends_ptr,
    bad_word_ends_stride,
    num_bad_words_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    num_words = tl.load(num_bad_words_ptr + slot)
    if tl.program_id(1) * BLOCK >= num_words:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    matched = word < num_words
    ends_ptr = bad_word_ends_ptr + slot * bad_word_ends_stride + word
    ids_ptr = bad_word_ids_ptr + slot * bad_word_ids_stride
    end = tl.load(ends_ptr, mask=matched, other=1)
    prefix = end - 1 - tl.load(ends_ptr - 1, mask=matched & (word > 0), other=0)
    last = tl.load(ids_ptr + end - 1, mask=matched, other=0)
    committed = tl.load(total_len_ptr + slot)
    drafts = tl.load(spec_count_ptr + row)
    spec_ptr = spec_ids_ptr + tl.load(spec_start_ptr + row).to(tl.int64)
    matched = matched & (prefix <= committed + drafts) & (last < vocab_size)
    for back in range(tl.max(tl.where(matched, prefix, 0), axis=0)):
        at = committed + drafts - 1 - back  # counted over committed tokens and drafts
        draft = tl.load(spec_ptr + (at - committed), mask=at >= committed, other=-1)
        token = tl.load(token_ids_ptr + slot * token_ids_stride + at, mask=at < committed, other=-1)
        token = tl.where(at >= committed, draft, token.to(tl.int64))
        wanted = tl.load(ids_ptr + end - 2 - back, mask=matched & (back < prefix), other=0)
        matched = matched & ((back >= prefix) | (wanted.to(tl.int64) == token))
    gone = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + last, gone, mask=matched)


def apply_bad_words_triton(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    bad_word_ids: torch.Tensor,
    bad_word_ends: torch.Tensor,
    num_bad_words: torch.Tensor,
) -> None:
    """Do what `apply_bad_words` does, by a (rows x blocks of words) grid."""
    if not logits.numel() or not bad_word_ends.shape[1]:
        return
    _bad_words_kernel[(logits.shape[0], triton.cdiv(bad_word_ends.shape[1], _BLOCK))](
        logits,
        logits.stride(0),
        row_slots,
        spec_ids,
        spec_start,
        spec_count,
        token_ids,
        token_ids.stride(0),
        total_len,
        bad_word_ids,
        bad_word_ids.stride(0),
        bad_word_ends,
        bad_word_ends.stride(0),
        num_bad_words,
        logits.shape[1],
        BLOCK=_BLOCK,
    )
