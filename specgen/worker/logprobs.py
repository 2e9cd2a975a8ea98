"""Log-probabilities on their way from the device: of sampled tokens, and of the tokens of prompts.

Knows which logits rows belong to which row of the step, and how to keep the memory for a prompt's logits small. Does
not know how a log-probability is computed (`kernels/logprobs.py`), nor where a row ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specgen.engine.request import TokenLogprob
from specgen.engine.step import PromptLogprobs, ScheduledRow
from specgen.kernels.logprobs import Logprobs, gather_logprobs
from specgen.worker.states import RequestStates, to_device

# Rows of a prompt whose logits are made at a time.
_PROMPT_ROWS = 64


class HostLogprobs(NamedTuple):
    """A copy of `Logprobs` that the device fills, with each row's token."""

    token_ids: torch.Tensor
    token: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def rows(self, first: int, count: int, num_top: int) -> list[TokenLogprob]:
        """So many rows from `first` on, once the copy is done."""
        rows = slice(first, first + count)
        parts = (self.token_ids[rows], self.token[rows], self.top_ids[rows, :num_top], self.top[rows, :num_top])
        return [
            TokenLogprob(token_id, value, tuple((i, v) for i, v in zip(ids, values, strict=True) if i >= 0))
            for token_id, value, ids, values in zip(*(part.tolist() for part in parts), strict=True)
        ]


def to_host(token_ids: torch.Tensor, logprobs: Logprobs) -> HostLogprobs:
    """Starts the copy; it is done when an event recorded after it is."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return HostLogprobs(copy(token_ids), *map(copy, logprobs))


class SampledLogprobs(NamedTuple):
    """The logits rows of a step; `first[b]` is the first one of the step's row b, `wanted[b]` how many tokens beside
    the sampled one it wants, -1 for a row that wants nothing."""

    host: HostLogprobs
    first: list[int]
    wanted: list[int]

    def of(self, row: int, num_sampled: int) -> list[TokenLogprob]:
        """What the step's row `row` wants of its sampled tokens."""
        if self.wanted[row] < 0:
            return []
        return self.host.rows(self.first[row], num_sampled, self.wanted[row])


class PromptPart(NamedTuple):
    """Tokens `first` to `first + num_tokens - 1` of the prompt of the step's row `row`, which are at `at` in `host`."""

    row: int
    first: int
    num_tokens: int
    num_top: int
    host: HostLogprobs
    at: int

    def get(self) -> PromptLogprobs:
        """The values, once the copy is done."""
        return PromptLogprobs(self.first, self.host.rows(self.at, self.num_tokens, self.num_top))


def judge_prompts(
    rows: Sequence[ScheduledRow],
    states: RequestStates,
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> list[PromptPart]:
    """The log-probabilities of the prompts' tokens that follow one of the step's tokens.

    `hidden [T, H]`: the target's, of all tokens of the step. The logits are those of the model, in groups of rows.
    """
    flat = [(b, *_judged(row, states)) for b, row in enumerate(rows)]
    starts = np.cumsum([0, *(row.num_tokens for row in rows)])
    parts = [(b, position, count) for b, position, count in flat if count > 0]
    if not parts:
        return []
    indices = np.concatenate([starts[b] + np.arange(count) for b, _, count in parts])
    slots = np.concatenate([np.full(count, rows[b].slot) for b, _, count in parts])
    following = np.concatenate([position + 1 + np.arange(count) for _, position, count in parts])
    index, slot, place = to_device(np.stack([indices, slots, following]).astype(np.int64), states.device)
    token_ids = states.token_ids[slot, place].long()
    row_slots = slot.to(torch.int32)
    out = Logprobs.empty(len(indices), states.device)
    for start in range(0, len(indices), _PROMPT_ROWS):
        part = slice(start, start + _PROMPT_ROWS)
        logits = compute_logits(hidden[index[part]])
        group = Logprobs(*(tensor[part] for tensor in out))
        gather_logprobs(logits, row_slots[part], token_ids[part], states.num_prompt_logprobs, group)
    host = to_host(token_ids, out)
    at = np.cumsum([0, *(count for _, _, count in parts)]).tolist()
    return [
        PromptPart(b, position + 1, count, int(states.num_prompt_wanted[rows[b].slot]), host, at[i])
        for i, (b, position, count) in enumerate(parts)
    ]


def _judged(row: ScheduledRow, states: RequestStates) -> tuple[int, int]:
    """From which position on, and for how many of the row's tokens in the step, the next token is one of a prompt."""
    first = row.num_computed_after - row.num_tokens  # exact as long as the row is in its prompt
    return first, min(row.num_tokens, int(states.prompt_to_judge[row.slot]) - 1 - first)
