"""Stop strings: where the text of one row ends, found token by token.

Knows a row's text as it grows and which strings end it. Does not know token ids that end a row, nor lengths.

The earliest end wins: of several strings in a token's text the one whose last character comes first, of those that end
there together the longest. A string that is complete within the first `min_tokens` tokens ends nothing.
"""

import functools
from collections.abc import Callable, Sequence

from specgen.engine.request import EngineOutput
from specgen.sampling_params import SamplingParams
from specgen.tokenizer import Tokenizer


def stop_check_of(params: SamplingParams, tokenizer: Tokenizer) -> "Callable[[], StopStrings] | None":
    """Return what makes the row's check for stop strings, None if it has none."""
    if not params.stop:
        return None
    return functools.partial(StopStrings, tokenizer, params.stop, params.min_tokens)


def answer_text(tokenizer: Tokenizer, token_ids: Sequence[int], params: SamplingParams, output: EngineOutput) -> str:
    """Return the text of a row that ended with `output`: without the token that ended it, or cut at its stop string."""
    if output.stop_at is None:
        return tokenizer.decode(token_ids[:-1] if output.finish_reason == "stop" else token_ids)
    end = output.stop_at + (len(str(output.stop)) if params.include_stop else 0)
    return tokenizer.decode(token_ids)[:end]


class StopStrings:
    """Looks for `stops` in one row's text; half a character at its end is never looked at."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        """`stops`: not empty, and none of them is. Tokens are pushed one by one."""
        self._stream = tokenizer.new_stream()
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_characters = 0
        self._overlap = max(map(len, stops)) - 1
        self._tail = ""  # the last characters so far, as many as a string that ends later may need

    def push(self, token_id: int) -> tuple[str, int] | None:
        """Take the row's next token; return the string with which the text is to end, and the character where that
        begins, once there is one.
        """
        self._num_tokens += 1
        piece = self._stream.push([token_id])
        text, start = self._tail + piece, self._num_characters - len(self._tail)
        if self._stream.has_failed:
            text, start = self._stream.decoded().rstrip("\ufffd"), 0
        seen = self._num_characters - start
        self._num_characters = start + len(text)
        self._tail = text[max(0, len(text) - self._overlap) :]
        if self._num_tokens <= self._min_tokens:
            return None
        found = _first_end(text, self._stops, seen)
        return None if found is None else (found[0], start + found[1])


def _first_end(text: str, stops: Sequence[str], seen: int) -> tuple[str, int] | None:
    """The string that ends first behind the character `seen` of the text, and where it begins."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(0, seen - len(stop) + 1))
        if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
            best = (at + len(stop), at, stop)
    return None if best is None else (best[2], best[1])
