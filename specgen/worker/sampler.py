"""From logits to a token: a row's processors in a fixed order, then the arg max with the row's own noise.

The same for target and draft rows. A row's token is a function of its logits, parameters, committed tokens and drafts
before it, its seed and its position; see `specgen.kernels.gumbel` for the noise. The order, which is transformers':

    allowed_token_ids    others become -inf
    logit_bias           added
    min_tokens           EOS and stop ids become -inf while the row is shorter
    repetition, frequency and presence penalty
    no_repeat_ngram_size the token that would repeat a sequence becomes -inf
    bad_words_ids        the token that would complete a word becomes -inf
    temperature          from here on at temperature > 0 only: at 0 none of it would change the arg max
    top_k, top_p, min_p  what they remove becomes -inf; equal logits stay or go together
    typical_p            the same
    noise, arg max       ties go to the lowest id

-inf stays -inf through all of it. NaN is never chosen: filters remove it, the arg max takes it for -inf. A row in which
every token is -inf or NaN takes token 0; `SamplingParams` refuses the parameters of which that can be told beforehand.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from specgen.kernels.ratio import DRAFT_STREAM
from specgen.kernels.sample_tokens import LogitsRows, Sampled, SamplingTables, Wanted, sample_tokens
from specgen.kernels.softcap import softcap
from specgen.worker.processor_needs import ProcessorNeeds
from specgen.worker.states import RequestStates


class SamplingRows(NamedTuple):
    """Which request each logits row belongs to, where it stands, and which drafts precede it.

    row_slots, spec_start, spec_count `[N] int32`; positions `[N] int64`, of the input token of the row; spec_ids
    `[M] int64`, row n's drafts being `spec_ids[spec_start[n] : spec_start[n] + spec_count[n]]`. `needs`: the
    processors that some row uses.
    """

    row_slots: torch.Tensor
    positions: torch.Tensor
    spec_ids: torch.Tensor
    spec_start: torch.Tensor
    spec_count: torch.Tensor
    needs: ProcessorNeeds

    def part(self, start: int, end: int) -> SamplingRows:
        """Rows `start` to `end`."""
        part = slice(start, end)
        return self._replace(
            row_slots=self.row_slots[part],
            positions=self.positions[part],
            spec_start=self.spec_start[part],
            spec_count=self.spec_count[part],
        )


class Noise(enum.Enum):
    """Which noise a draw is made with: the row's own, which target and drafts share; one for drafts alone; none."""

    SHARED = enum.auto()
    DRAFT = enum.auto()
    NONE = enum.auto()


class Sampler:
    """Processors and sampling over the parameters in `states`."""

    def __init__(self, states: RequestStates, logits_cap: float | None = None) -> None:
        """`logits_cap`: the model's own, see `cap`."""
        self._logits_cap = logits_cap
        self._tables = SamplingTables(*(getattr(states, name) for name in SamplingTables._fields))
        self._no_temperature = torch.zeros_like(states.temperature)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with the model's cap on them, if it has one; in place."""
        return logits if self._logits_cap is None else softcap(logits, self._logits_cap)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        noise: Noise = Noise.SHARED,
        *,
        keep: bool = True,
        sharpness: float = 1.0,
        extra_ids: torch.Tensor | None = None,
    ) -> Sampled:
        """The tokens of `logits [N, V] float32`, which become the processed ones, divided by the temperature; without
        `keep`, they are spoilt, which is quicker. `sharpness`: what the draw multiplies them with. `extra_ids`: of a
        cut vocabulary, see `sample_tokens`.
        """
        needs, tables = rows.needs, self._tables
        if noise is Noise.DRAFT:
            tables = tables._replace(seeds=tables.seeds ^ DRAFT_STREAM)
        if noise is Noise.NONE:
            tables = tables._replace(temperature=self._no_temperature)
        wanted = Wanted(
            rules=needs.rules,
            penalties=needs.penalties,
            noise=needs.noise and noise is not Noise.NONE,
            filters=needs.filters,
            min_p=needs.min_p,
            typical_p=needs.typical_p,
            keep=keep,
        )
        return sample_tokens(logits, LogitsRows(*rows[:5]), tables, wanted, sharpness, extra_ids)
