"""From the target's hidden states to its tokens: logits, their processors and draw, and what is wanted of them.

Knows how many rows of logits to make at once, where drafts are judged by ratio, and of which logits a log-probability
is. Does not know how logits become a token (`sampler.py`), nor whether drafts agree with it (`model_runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specgen.kernels.logprobs import Logprobs, gather_logprobs
from specgen.kernels.ratio import ratio_sample
from specgen.models.families import TargetModel
from specgen.worker.sampler import Sampler, SamplingRows
from specgen.worker.states import RequestStates

_MOST_LOGITS = 512  # rows of logits and their copies in memory at once, as a rule


class LogitsSeen(NamedTuple):
    """A step's logits rows: as the target gave them, as the sampler left them (both `[N, V] float32`), and the tokens.

    `sampled [N] int64`. What the sampler left is processed and divided by the temperature, without the noise.
    """

    logits: torch.Tensor
    processed: torch.Tensor
    sampled: torch.Tensor


class Drawn(NamedTuple):
    """Logits rows' tokens `[N] int64`, whether their logits held a NaN `[N] bool`, and what is wanted of them.

    `logprobs`: of the tokens, N rows; None if no row wants any.
    """

    token_ids: torch.Tensor
    bad_rows: torch.Tensor
    logprobs: Logprobs | None


class TargetSampler:
    """Draws the target's tokens, over the parameters in `states`.

    `on_logits`, if it is set, is given the logits of every draw; a graph that runs again tells it nothing.
    """

    def __init__(self, target: TargetModel, states: RequestStates, sampler: Sampler) -> None:
        """`states`: the sampler's; drafts are judged by ratio where they keep the drafts' logits."""
        self._target = target
        self._states = states
        self._sampler = sampler
        self.on_logits: Callable[[LogitsSeen], None] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits `[N, V] float32` of some hidden states `[N, H]`."""
        return self._sampler.cap(self._target.compute_logits(hidden))

    def draw(self, hidden: torch.Tensor, rows: SamplingRows) -> Drawn:
        """The target's token of each logits row of `hidden [N, H]`, and what else is known of them.

        Many rows go in equal parts, lest their logits take more memory than all else. Not where rows are judged by
        those behind them, nor for `on_logits`.
        """
        by_ratio = self._states.draft_logits.shape[0] > 0 and rows.needs.noise
        most = _MOST_LOGITS // 2 if rows.needs.raw_logprobs else _MOST_LOGITS
        is_whole = by_ratio or self.on_logits is not None
        num_parts = 1 if is_whole else max(1, -(-len(hidden) // most))
        size = max(1, -(-len(hidden) // num_parts))
        starts = range(0, max(1, len(hidden)), size)
        return _joined([self._draw_part(hidden[at : at + size], rows.part(at, at + size), by_ratio) for at in starts])

    def _draw_part(self, hidden: torch.Tensor, rows: SamplingRows, by_ratio: bool) -> Drawn:
        logits = self.logits(hidden)
        # the sampler works in place
        given = logits.clone() if self.on_logits is not None or rows.needs.raw_logprobs else logits
        keep = by_ratio or self.on_logits is not None or rows.needs.processed_logprobs
        token_ids, bad_rows = self._sampler.sample(logits, rows, keep=keep)
        if self.on_logits is not None:
            self.on_logits(LogitsSeen(given, logits, token_ids))
        if by_ratio:
            # an accepted draft, or what replaces it: strict comparison with the drafts does the rest
            token_ids = ratio_sample(
                logits,
                token_ids,
                rows.spec_ids,
                self._states.draft_logits,
                rows.row_slots,
                rows.spec_count,
                rows.positions,
                self._states.seeds,
                self._states.temperature,
            )
        return Drawn(token_ids, bad_rows, self._judge(given, logits, rows, token_ids) if rows.needs.logprobs else None)

    def _judge(
        self, given: torch.Tensor, processed: torch.Tensor, rows: SamplingRows, sampled: torch.Tensor
    ) -> Logprobs:
        """The log-probabilities of the rows' tokens, by the model's logits or by what they were drawn from."""
        s, out = self._states, Logprobs.empty(len(sampled), sampled.device)
        if rows.needs.raw_logprobs:
            gather_logprobs(given, rows.row_slots, sampled, s.num_raw_logprobs, out)
        if rows.needs.processed_logprobs:
            gather_logprobs(processed, rows.row_slots, sampled, s.num_processed_logprobs, out)
        return out


def _joined(parts: list[Drawn]) -> Drawn:
    """The parts' rows one behind the other."""
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Drawn(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.bad_rows for part in parts]),
        Logprobs(*map(torch.cat, zip(*logprobs, strict=True))) if logprobs else None,
    )
