"""What passes between the scheduler and the worker: a step's rows, and what they sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from specgen.engine.request import EngineOutput, TokenLogprob
from specgen.sampling_params import SamplingParams

# Tokens of a step beyond which launches one by one are no matter: models for which they take longer than the step
# itself rarely have so long ones, and for large models the padding of a graph costs more.
LONG_STEP = 4096


class NewRow(NamedTuple):
    """What the worker needs when a request takes a slot. `token_ids`: the prompt and, after preemption, the output.

    `eos_token_ids`: those that end the row, like `params.stop_token_ids`. `max_total_len`: prompt and output together
    when it ends at the latest.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_computed_tokens: int
    kv_start: int
    eos_token_ids: frozenset[int] = frozenset()
    max_total_len: int = 2**31 - 1


class ScheduledRow(NamedTuple):
    """A request's part of a step: `num_tokens` inputs, the last `num_draft_tokens` of them drafts.

    `new_blocks`, a list of the row's own, go into the block table from index `first_block` on. `num_computed_after`,
    the step's first time, is exact for a row that does not sample, else an upper bound. `epoch` tells whether the
    request was preempted since.
    """

    request_id: int
    slot: int
    num_tokens: int
    num_draft_tokens: int
    samples: bool
    new_blocks: list[int]
    first_block: int
    epoch: int
    num_computed_after: int

    @property
    def is_decode(self) -> bool:
        """Whether it is the request's last token and drafts, nothing of a prompt besides."""
        return self.samples and self.num_tokens == 1 + self.num_draft_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """One step: rows in batch order, and how many drafts are of use after it (`num_spec_tokens`).

    `draft_limit`: how many drafts a row could have at most. `ended`: last outputs of requests that ended for want of
    blocks. `times`: how often the step runs in a row, each time behind what the last one sampled; more than once only
    if all rows decode, and none wants log-probabilities.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    num_spec_tokens: int = 0
    draft_limit: int = 0
    ended: list[EngineOutput] = field(default_factory=list)
    times: int = 1

    @property
    def num_decode_rows(self) -> int:
        """Its rows if all of them only decode, else 0."""
        return len(self.rows) if all(row.is_decode for row in self.rows) else 0

    def num_repeated(self, row: ScheduledRow) -> int:
        """Tokens that the times behind the first are expected to add to a row."""
        return (self.times - 1) * row.num_tokens

    @property
    def max_computed_after(self) -> int:
        """Upper bound of any row's computed tokens after the step."""
        return max(row.num_computed_after + self.num_repeated(row) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Input tokens of the step, each time."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_long(self) -> bool:
        """Whether it has so many tokens, parts of prompts among them, that the target is launched without a graph."""
        return self.num_tokens > LONG_STEP and not self.num_decode_rows


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens from index `first` on."""

    first: int
    values: list[TokenLogprob]


class ModelRunnerOutput(NamedTuple):
    """What a step sampled: for each row, in order, its committed token ids ([] for an unfinished prefill).

    A row's ids, of all times that the step ran, stop where it ends by an end id or its length; one that ended in an
    earlier step has none. `NAN_TOKEN` stands for a token that could not be sampled. num_sampled: how many they are,
    num_accepted: how many of them were drafts; of the first row at each time that the step ran, then of the second.

    logprobs: those of each row's tokens, [] for a row that wants none; None if no row does. prompt_logprobs: by the
    index of the row.
    """

    sampled_token_ids: list[list[int]]
    num_sampled: list[int]
    num_accepted: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: Mapping[int, PromptLogprobs] = MappingProxyType({})
