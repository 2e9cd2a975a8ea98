"""Repetition, frequency and presence penalties, exact under speculation.

Knows: which tokens the prompt has, how often each was emitted, and the drafts in front of a logits row. A row that
judges the draft after drafts 1..j counts those j drafts as emitted: the row is only used if they were accepted, so
the result is what plain decoding computes there. In plain torch: the twin. On the device they are part of the pass in
`sample_tokens.py`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device


def id_mask_of(token_ids: "Sequence[int] | np.ndarray", vocab_size: int) -> np.ndarray:
    """Return the packed set of the token ids, `[ceil(vocab_size / 32)] int32`: bit v % 32 of word v // 32 is
    token v.

    Ids outside the vocabulary (placeholders of other modalities) are left out.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    present = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    present[ids[(ids >= 0) & (ids < vocab_size)]] = 1
    return np.packbits(present, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def apply_penalties(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    spec_ids: torch.Tensor,
    spec_start: torch.Tensor,
    spec_count: torch.Tensor,
    *,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
) -> None:
    """Each row of `logits [N, V] float32` has its slot's penalties applied, in place; neutral and padded rows stay as
    they are.

    count[v] = `output_counts[slot, v]` + occurrences of v in `spec_ids[spec_start[n] : spec_start[n] + spec_count[n]]`
    (ids < 0 ignored). If v is in the prompt or count > 0: positive logits are divided by the repetition penalty, others
    multiplied. Then - frequency * count - presence * [count > 0].
    `row_slots [N] int32` (-1 = padded), `spec_ids [M] int64`, `spec_start`, `spec_count [N] int32`, `prompt_mask
    [R, ceil(V/32)] int32`, `output_counts [R, V] int32`, the penalties `[R] float32` (neutral: 1, 0, 0).
    Raises: ValueError on a wrong dtype, shape or layout.
    Source: Keskar et al., arXiv 1909.05858 (repetition); OpenAI API reference (frequency, presence).
    """
    num_rows, vocab = logits.shape
    num_slots = output_counts.shape[0]
    check("logits", logits, torch.float32, num_rows, vocab)
    check("row_slots", row_slots, torch.int32, num_rows)
    check("spec_ids", spec_ids, torch.int64, None)
    check("spec_start", spec_start, torch.int32, num_rows)
    check("spec_count", spec_count, torch.int32, num_rows)
    check("prompt_mask", prompt_mask, torch.int32, num_slots, -(-vocab // 32))
    check("output_counts", output_counts, torch.int32, num_slots, vocab)
    check("repetition_penalty", repetition_penalty, torch.float32, num_slots)
    check("frequency_penalty", frequency_penalty, torch.float32, num_slots)
    check("presence_penalty", presence_penalty, torch.float32, num_slots)
    check_same_device(logits=logits, row_slots=row_slots, spec_ids=spec_ids, output_counts=output_counts)
    vocab = logits.shape[1]
    in_use = (repetition_penalty != 1) | (frequency_penalty != 0) | (presence_penalty != 0)
    rows = ((row_slots >= 0) & in_use[row_slots.long().clamp(min=0)]).nonzero().flatten()
    if not rows.numel():
        return
    slots = row_slots[rows].long()
    counts = output_counts[slots]
    num_drafts = int(spec_count[rows].max())
    if num_drafts > 0:
        column = torch.arange(num_drafts)
        drafts = spec_ids[(spec_start[rows, None] + column).clamp(max=spec_ids.shape[0] - 1)]
        of_row, nth = ((column < spec_count[rows, None]) & (drafts >= 0)).nonzero(as_tuple=True)
        counts.index_put_((of_row, drafts[of_row, nth]), torch.ones((), dtype=torch.int32), accumulate=True)
    words = prompt_mask[slots].view(torch.uint8).numpy()
    in_prompt = torch.from_numpy(np.unpackbits(words, axis=1, count=vocab, bitorder="little")).view(torch.bool)
    of_row, token = ((counts > 0) | in_prompt).nonzero(as_tuple=True)

    at, slot, count = (rows[of_row], token), slots[of_row], counts[of_row, token]
    value, repetition = logits[at], repetition_penalty[slot]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= frequency_penalty[slot] * count
    value -= presence_penalty[slot] * (count > 0)
    logits[at] = value
