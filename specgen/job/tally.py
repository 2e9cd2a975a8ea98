"""What is counted over the answers of an output, and which of them are worth looking at.

Knows answers as they come out of lines, as plain values. Does not know files, nor how figures are shown.
"""

import heapq
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.stats import SpecStats

_NUM_SHOWN = 10
_NUM_OF_A_CODE = 5
_NUM_SLICES = 40
# Values of a column that are told apart while counting; the commonest of them are shown.
_MOST_VALUES = 10_000
_NUM_BINS = 24
_TEXT_SHOWN = 160
# A row with fewer drafts says little about acceptance.
MIN_DRAFTED = 16


@dataclass(slots=True)
class Line:
    """One answer, whatever form it was written in. text: "" if it failed. data: the columns of its row."""

    name: str | None
    index: int | None
    sample: int | None
    text: str
    finish_reason: str
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: SpecStats | None
    error: Mapping[str, Any] | None
    data: Mapping[str, Any]


@dataclass(slots=True)
class _Group:
    """Counts over some answers."""

    answers: int = 0
    failed: int = 0
    cut: int = 0
    completion_tokens: int = 0
    tokens_of_failed: int = 0
    spec: SpecStats = field(default_factory=SpecStats)

    def add(self, line: Line) -> None:
        """Counts an answer."""
        self.answers += 1
        self.cut += line.finish_reason == "length"
        self.completion_tokens += line.completion_tokens
        if line.error is not None:
            self.failed += 1
            self.tokens_of_failed += line.completion_tokens
        if line.spec is not None:
            self.spec.add(line.spec)

    def add_group(self, other: "_Group") -> None:
        """Counts all answers of another."""
        for name in ("answers", "failed", "cut", "completion_tokens", "tokens_of_failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.spec.add(other.spec)

    def as_dict(self) -> dict[str, Any]:
        """The counts, and the means, rounded: of tokens over the answers that did not fail; None over none."""
        num_ok, spec = self.answers - self.failed, self.spec
        return {
            "answers": self.answers,
            "failed": self.failed,
            "cut": self.cut,
            "mean_tokens": round((self.completion_tokens - self.tokens_of_failed) / num_ok, 2) if num_ok else None,
            "mean_accepted_length": round(spec.mean_accepted_length, 4) if spec.steps else None,
            "acceptance_rate": round(spec.acceptance_rate, 4) if spec.drafted else None,
        }


class _Top:
    """The lines with the highest scores, `_NUM_SHOWN` at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, dict[str, Any]]] = []
        self._count = 0

    def offer(self, score: float, line: Line) -> None:
        self._count += 1
        if len(self._heap) < _NUM_SHOWN:
            heapq.heappush(self._heap, (score, -self._count, _shown(line)))
        elif score > self._heap[0][0]:
            heapq.heapreplace(self._heap, (score, -self._count, _shown(line)))

    def lines(self) -> list[dict[str, Any]]:
        return [shown for _, _, shown in sorted(self._heap, reverse=True, key=lambda item: item[:2])]


class Tally:
    """What is counted over all lines of an output; `whole` over all, `slices` by the values of the columns `by`."""

    def __init__(self, by: Sequence[str]) -> None:
        self.whole = _Group()
        self.num_unreadable = 0
        self.slices: dict[str, dict[str | None, _Group]] = {name: {} for name in by}
        self._num_empty = self._prompt_tokens = self._cached_tokens = 0
        self._finish, self._stops, self._codes = Counter[str](), Counter[str](), Counter[str]()
        self._prompts, self._answers = Counter[int](), Counter[int]()
        self._steps, self._rejecting = _Top(), _Top()
        self._failures: dict[str, list[dict[str, Any]]] = {}

    def add(self, line: Line) -> None:
        """Counts an answer, in the whole and in its slices; a failed one gives nothing but its code and itself."""
        self.whole.add(line)
        self._finish[line.finish_reason] += 1
        for name, groups in self.slices.items():
            if name in line.data:
                _slice(groups, line.data[name]).add(line)
        if line.error is not None:
            code = str(line.error.get("code"))
            self._codes[code] += 1
            if self._codes[code] <= _NUM_OF_A_CODE:
                self._failures.setdefault(code, []).append(_shown(line) | {"error": dict(line.error)})
            return
        self._stops[line.stop or ""] += line.finish_reason == "stop"
        self._prompts[line.prompt_tokens] += 1
        self._answers[line.completion_tokens] += 1
        self._prompt_tokens += line.prompt_tokens
        self._cached_tokens += line.cached_tokens
        self._num_empty += not line.text.strip()
        if line.spec is not None:
            self._steps.offer(line.spec.steps, line)
            if line.spec.drafted >= MIN_DRAFTED:
                self._rejecting.offer(-line.spec.acceptance_rate, line)

    def as_dict(self) -> dict[str, Any]:
        """The figures of all lines, rounded, as the report has them: the first failures of each code."""
        whole, spec = self.whole, self.whole.spec
        per_pos = enumerate(zip(spec.accepted_per_pos, spec.drafted_per_pos, strict=True), start=1)
        return {
            "totals": whole.as_dict()
            | {
                "completion_tokens": whole.completion_tokens,
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached_tokens,
                "empty": self._num_empty,
                "steps": spec.steps,
                "drafted": spec.drafted,
                "accepted": spec.accepted,
            },
            "acceptance_per_pos": [
                {"position": position, "accepted": accepted, "drafted": drafted, "rate": round(accepted / drafted, 4)}
                for position, (accepted, drafted) in per_pos
                if drafted
            ],
            "finish_reasons": dict(self._finish.most_common()),
            "stops": {stop: count for stop, count in self._stops.most_common(_NUM_SHOWN) if count},
            "prompt_lengths": _distribution(self._prompts),
            "answer_lengths": _distribution(self._answers),
            "slices": {name: _sliced(groups) for name, groups in self.slices.items()},
            "most_steps": self._steps.lines(),
            "least_accepted": self._rejecting.lines(),
            "error_codes": dict(self._codes.most_common()),
            "failures": [shown for code, _ in self._codes.most_common() for shown in self._failures[code]],
        }


def _shown(line: Line) -> dict[str, Any]:
    spec = line.spec if line.spec is not None and line.spec.steps else None
    return {
        "id": line.name,
        "index": line.index,
        "sample": line.sample,
        "finish_reason": line.finish_reason,
        "tokens": line.completion_tokens,
        "steps": spec.steps if spec is not None else None,
        "acceptance_rate": round(spec.acceptance_rate, 4) if spec is not None and spec.drafted else None,
        "mean_accepted_length": round(spec.mean_accepted_length, 4) if spec is not None else None,
        "text": _clipped(line.text),
    }


def _clipped(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…"


def _slice(groups: dict[str | None, _Group], value: object) -> _Group:
    name: str | None = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name not in groups and len(groups) >= _MOST_VALUES:
        name = None
    return groups.setdefault(name, _Group())


def _sliced(groups: Mapping[str | None, _Group]) -> list[dict[str, Any]]:
    """The commonest values, then all others together, whose value is None."""
    named = sorted(((name, group) for name, group in groups.items() if name is not None), key=lambda i: -i[1].answers)
    found = [{"value": _clipped(name)} | group.as_dict() for name, group in named[:_NUM_SLICES]]
    others = groups.get(None, _Group())
    for _, group in named[_NUM_SLICES:]:
        others.add_group(group)
    return found + ([{"value": None} | others.as_dict()] if others.answers else [])


def _distribution(lengths: Counter[int]) -> dict[str, Any] | None:
    """Return mean, median, the length that nine of ten do not exceed, and equal ranges with how many are in them."""
    if not lengths:
        return None
    low, high, count = min(lengths), max(lengths), lengths.total()
    width = -(-(high - low + 1) // _NUM_BINS)
    in_bins = Counter[int]()
    for length, how_many in lengths.items():
        in_bins[(length - low) // width] += how_many
    return {
        "mean": round(sum(length * how_many for length, how_many in lengths.items()) / count, 2),
        "median": _quantile(lengths, 0.5),
        "p90": _quantile(lengths, 0.9),
        "most": high,
        "bins": [
            {"from": low + width * number, "to": min(high, low + width * (number + 1) - 1), "count": in_bins[number]}
            for number in range((high - low) // width + 1)
        ],
    }


def _quantile(lengths: Counter[int], share: float) -> int:
    """The smallest length that at least `share` of all do not exceed."""
    left = math.ceil(share * lengths.total())
    for length in sorted(lengths):
        left -= lengths[length]
        if left <= 0:
            break
    return length
