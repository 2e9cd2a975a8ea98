"""What the engine is asked for, what it answers, and the state of one request in between.

Knows tokens and counts. Does not know text, rows of files, or devices.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specgen.sampling_params import SamplingParams
from specgen.stats import SpecStats

EOS_NAME = "<eos>"
NAN_TOKEN = -2  # in place of a sampled token whose logits are not numbers


class StopCheck(Protocol):
    """Looks for stop strings in one row's text, of which the engine knows nothing."""

    def push(self, token_id: int) -> tuple[str, int] | None:
        """Takes the next token; the string with which the text ends now, and the character where it begins."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `seed` is the row's 64-bit noise seed; `request_id` is unique within an engine.

    `new_stop_check` makes what looks for `params.stop`, anew for each run of the request. `num_given_tokens`: so many
    of the prompt's first tokens count as computed, whatever the cache holds for them: for benchmarks, whose tokens mean
    nothing then.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    new_stop_check: Callable[[], StopCheck] | None = None
    num_given_tokens: int = 0


class TokenLogprob(NamedTuple):
    """A token's log-probability, -inf if it was ruled out, and those of the likeliest tokens, as (id, value) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(NamedTuple):
    """Tokens that a request gained in a step; with `finish_reason` it is the request's last output.

    `finish_reason` is "stop" | "length" | "error" | "abort" | None; `stop` is "<eos>", the stop token id or the stop
    string, and `stop_at` the character of the answer's text where that string begins. `stats` and `prompt_logprobs`
    (None for the first token, which follows nothing) are set on the last output only. `logprobs`: of the new tokens,
    if the row wants them.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop: str | int | None = None
    stats: SpecStats | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    stop_at: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Status(enum.Enum):
    """Where a request stands. A preempted request is WAITING again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine.

    State of the token axis (K drafts scheduled, a step in flight):

        0 ........ num_prompt ........ num_tokens | placeholders: promised by steps in flight
        [ prompt  ][ output           ][ ? ? ? ? ]
        [ num_computed_tokens: optimistic, as if all drafts in flight were accepted and no row ended in between ]
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int]  # eos_ids and the row's own stop ids
    eos_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    num_output_placeholders: int = 0
    num_steps_in_flight: int = 0
    num_sampling_steps_in_flight: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_given_tokens: int = 0
    num_lookahead_slots: int = 0
    slot: int = -1
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop: str | int | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    stop_check: StopCheck | None = None
    stop_at: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Upper bound of the tokens that a step scheduled now can still add (each step in flight adds at least one)."""
        num_output = len(self.token_ids) - len(self.prompt_token_ids)
        return self.max_tokens - num_output - self.num_sampling_steps_in_flight

    def num_usable_drafts(self, limit: int, num_more: int = 0) -> int:
        """Drafts, up to `limit`, that can be verified behind the sampling steps in flight and so many more."""
        return max(0, min(limit, self.num_tokens_left - num_more - 1)) if limit else 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted and not there yet: cached KV cannot give them."""
        return self.prompt_logprobs is not None and None in self.prompt_logprobs[1:]

    @property
    def is_finished(self) -> bool:
        """Whether the last output was made."""
        return self.status is Status.FINISHED
