"""A tokenizer for models without text: token i is one letter, or two for every third."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specgen.sampling_params import SamplingParams
from specgen.stops import StopStrings


def letters(token_id: int) -> str:
    """The text of a token."""
    one = chr(ord("a") + token_id % 20)
    return one + chr(ord("A") + token_id % 7) if token_id % 3 == 0 else one


class Letters:
    """As much of a `Tokenizer` as stop strings need."""

    class Stream:
        has_failed = False

        def push(self, token_ids: Sequence[int]) -> str:
            return "".join(map(letters, token_ids))

    def new_stream(self) -> Stream:
        return self.Stream()


def check_of(params: SamplingParams) -> Callable[[], Any] | None:
    """What makes the check for a row's stop strings."""
    tokenizer: Any = Letters()
    return (lambda: StopStrings(tokenizer, params.stop, params.min_tokens)) if params.stop else None
