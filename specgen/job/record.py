"""The output line of an answer: its shape, and strict JSON in valid UTF-8.

The keys are always the same and in the same order, but that logprobs and prompt_logprobs are there only if the row
asked for them. For a row that failed: text, stop and seed are null, error is an object, usage counts what was really
computed (0 for a row that never ran) and spec is null if it never ran; sample is null if the failure is the whole
row's.
"""

import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specgen.engine.request import TokenLogprob
from specgen.errors import RowError
from specgen.job.plan import Plan
from specgen.stats import SpecStats

_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(slots=True)
class Answer:
    """How one sample of a row ended. sample: None if the whole row failed. error: None if it did not.

    token_ids: all ids, the ending one included. truncated_from: tokens of the prompt before it was cut, if it was.
    """

    sample: int | None
    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: str = "error"
    stop: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spec: SpecStats | None = None
    seed: int | None = None
    truncated_from: int | None = None
    error: RowError | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """The `usage` object, in tokens; cached_tokens are those of the prompt found in the prefix cache."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """What a line of an output says about itself: whose it is, whether it failed, and its place in the input.

    mark: of the row as it was read, see `Form.mark`; 0 is unknown.
    """

    key: str
    sample: int | None
    failed: bool
    index: int
    mark: int = 0


class Form(Protocol):
    """How answers become lines, and lines are known again."""

    def num_lines(self, plan: Plan) -> int:
        """Return how many lines the row's samples give."""

    def key(self, plan: Plan) -> str:
        """Return the key under which `parse` knows the row again."""

    def mark(self, plan: Plan) -> int:
        """Return 24 bits that tell the row from one with another content, 0 if lines don't say what it was."""

    def line(self, plan: Plan, answer: Answer) -> bytes | None:
        """Return the line that the answer completes, if it does."""

    def parse(self, line: bytes) -> Kept:
        """Return what a line says. Raises: ValueError if it is no line of this form."""


class RecordForm:
    """One line a sample: specgen's own form."""

    def __init__(self, *, with_token_ids: bool, with_truncation: bool) -> None:
        self._with_token_ids = with_token_ids
        self._with_truncation = with_truncation

    def num_lines(self, plan: Plan) -> int:
        """Return how many lines the row's samples give."""
        return 1 if plan.error is not None else len(plan.samples)

    def key(self, plan: Plan) -> str:
        """Return the row's key."""
        return plan.key

    def mark(self, plan: Plan) -> int:
        """Return the mark of the row's columns."""
        return _mark_of(plan.row.data)

    def line(self, plan: Plan, answer: Answer) -> bytes:
        """Return the answer's line."""
        return to_line(self.record(plan, answer))

    def record(self, plan: Plan, answer: Answer) -> dict[str, Any]:
        """Return the answer as the object that its line holds."""
        row, error = plan.row, answer.error
        record: dict[str, Any] = {
            "id": row.id,
            "index": row.index,
            "sample": answer.sample,
            "key": plan.key,
            "text": answer.text if error is None else None,
        }
        if self._with_token_ids:
            record["token_ids"] = list(answer.token_ids) if error is None else None
        for name, entries in (("logprobs", answer.logprobs), ("prompt_logprobs", answer.prompt_logprobs)):
            if entries is not None and error is None:
                record[name] = [logprob_of(entry) for entry in entries]
        record["finish_reason"] = answer.finish_reason
        record["stop"] = answer.stop
        if self._with_truncation:
            record["prompt_truncated_from"] = answer.truncated_from
        record["usage"] = answer.usage
        record["spec"] = answer.spec.as_dict() if answer.spec is not None else None
        record["seed"] = answer.seed
        record["error"] = error_of(plan, error)
        record["input"] = row.data
        return record

    def parse(self, line: bytes) -> Kept:
        """Return what a line says. Raises: ValueError if it is no line of this form."""
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        key, sample, index = record.get("key"), record.get("sample"), record.get("index")
        if not isinstance(key, str) or not isinstance(index, int) or not isinstance(sample, (int, type(None))):
            raise ValueError("an object without key, sample and index")
        mark = _mark_of(record["input"]) if "input" in record else 0
        return Kept(key, sample, record.get("error") is not None, index, mark)


def _mark_of(data: dict[str, Any] | None) -> int:
    return zlib.crc32(to_line(data)) % 0xFFFFFF + 1


def logprob_of(entry: TokenLogprob | None) -> dict[str, Any] | None:
    """Return a token's log-probabilities as in a line: 7 digits; -inf is null, and so is the entry of a first token."""
    if entry is None:
        return None
    top = [[token_id, _finite(value)] for token_id, value in entry.top]
    return {"token_id": entry.token_id, "logprob": _finite(entry.logprob), "top": top}


def _finite(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def error_of(plan: Plan, error: RowError | None) -> dict[str, Any] | None:
    """Return the `error` object of a line; `file` is there if the input has several."""
    if error is None:
        return None
    place: dict[str, Any] = {"code": error.code, "message": str(error), "line": plan.row.line}
    return place if plan.row.file is None else place | {"file": plan.row.file}


def to_line(record: dict[str, Any] | None) -> bytes:
    """Return the record as one line of strict JSON in UTF-8, newline included; lone surrogates stay escaped."""
    text = _ENCODER.encode(record)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8") + b"\n"
