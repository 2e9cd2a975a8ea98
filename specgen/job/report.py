"""What an output says about its run: counts over all lines, and the lines worth looking at.

Knows records, manifests and figures, as plain JSON values. Does not know how they are shown (`report_page.py`).
"""

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.errors import InputError
from specgen.job.manifest import Manifest
from specgen.stats import SpecStats

_NUM_SHOWN = 20
_NUM_SLICES = 40
_NUM_BINS = 24
_TEXT_SHOWN = 160
# A row with fewer drafts says little about acceptance.
_MIN_DRAFTED = 16


@dataclass(slots=True)
class _Line:
    """One answer, whatever form it was written in."""

    name: str
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
    spec: SpecStats = field(default_factory=SpecStats)

    def add(self, line: _Line) -> None:
        """Counts an answer."""
        self.answers += 1
        self.failed += line.error is not None
        self.cut += line.finish_reason == "length"
        self.completion_tokens += line.completion_tokens
        if line.spec is not None:
            self.spec.add(line.spec)

    def as_dict(self) -> dict[str, Any]:
        """The counts, and the means over answers, rounded."""
        return {
            "answers": self.answers,
            "failed": self.failed,
            "cut": self.cut,
            "mean_tokens": round(self.completion_tokens / self.answers, 2) if self.answers else 0.0,
            "mean_accepted_length": round(self.spec.mean_accepted_length, 4),
            "acceptance_rate": round(self.spec.acceptance_rate, 4),
        }


class _Top:
    """The lines with the highest scores, `_NUM_SHOWN` at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, dict[str, Any]]] = []
        self._count = 0

    def offer(self, score: float, line: _Line) -> None:
        self._count += 1
        if len(self._heap) < _NUM_SHOWN:
            heapq.heappush(self._heap, (score, -self._count, _shown(line)))
        elif score > self._heap[0][0]:
            heapq.heapreplace(self._heap, (score, -self._count, _shown(line)))

    def lines(self) -> list[dict[str, Any]]:
        return [shown for _, _, shown in sorted(self._heap, reverse=True, key=lambda item: item[:2])]


class _Tally:
    """What is counted over all lines of an output."""

    def __init__(self, by: Sequence[str]) -> None:
        self.whole = _Group()
        self.num_unreadable = 0
        self.slices: dict[str, dict[str, _Group]] = {name: {} for name in by}
        self._num_empty = self._prompt_tokens = self._cached_tokens = 0
        self._finish, self._stops, self._codes = Counter[str](), Counter[str](), Counter[str]()
        self._prompts, self._answers = Counter[int](), Counter[int]()
        self._steps, self._rejecting = _Top(), _Top()
        self._failures: list[dict[str, Any]] = []

    def add(self, line: _Line) -> None:
        """Counts an answer, in the whole and in its slices; a failed one gives nothing but its code and itself."""
        self.whole.add(line)
        self._finish[line.finish_reason] += 1
        for name, groups in self.slices.items():
            if name in line.data:
                _slice(groups, line.data[name]).add(line)
        if line.error is not None:
            self._codes[str(line.error.get("code"))] += 1
            if len(self._failures) < _NUM_SHOWN:
                self._failures.append(_shown(line) | {"error": dict(line.error)})
            return
        self._stops[line.stop or ""] += line.finish_reason == "stop"
        self._prompts[line.prompt_tokens] += 1
        self._answers[line.completion_tokens] += 1
        self._prompt_tokens += line.prompt_tokens
        self._cached_tokens += line.cached_tokens
        self._num_empty += not line.text.strip()
        if line.spec is not None:
            self._steps.offer(line.spec.steps, line)
            if line.spec.drafted >= _MIN_DRAFTED:
                self._rejecting.offer(-line.spec.acceptance_rate, line)

    def as_dict(self) -> dict[str, Any]:
        """The figures of all lines, rounded, as the report has them."""
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
            "prompt_lengths": _bins(self._prompts),
            "answer_lengths": _bins(self._answers),
            "slices": {name: _sliced(groups) for name, groups in self.slices.items()},
            "most_steps": self._steps.lines(),
            "least_accepted": self._rejecting.lines(),
            "error_codes": dict(self._codes.most_common()),
            "failures": self._failures,
        }


def make_report(output: str, by: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of the output at `output`; `by` names columns of the input to slice them by.

    Raises: InputError if the output cannot be read or has no answers, or no row has a column of that name.
    """
    manifest = Manifest.read(output)
    tally = _Tally(by)
    for line in _lines(output):
        if line is None:
            tally.num_unreadable += 1
        else:
            tally.add(line)
    if not tally.whole.answers:
        raise InputError("there are no answers in it", where=output, hint="it takes an output of `specgen run`")
    for name, groups in tally.slices.items():
        if not groups:
            raise InputError(f"no row has a column {name!r}", where="--by")
    return {
        "output": output,
        "complete": manifest.content["complete"] if manifest is not None else None,
        "unreadable_lines": tally.num_unreadable,
        **tally.as_dict(),
        "over_time": _over_time(manifest),
        "manifest": manifest.content if manifest is not None else None,
    }


def _lines(output: str) -> Iterator[_Line | None]:
    """Yield every answer, None for a line that cannot be read."""
    try:
        with open(output, "rb") as stream:
            for raw in stream:
                try:
                    yield from _answers_in(json.loads(raw))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    yield None
    except OSError as error:
        raise InputError(f"the output cannot be read: {error.strerror}", where=output) from None


def _answers_in(record: dict[str, Any]) -> list[_Line]:
    if "custom_id" in record:
        return _answers_of_batch(record)
    usage, spec, stop = record["usage"], record["spec"], record["stop"]
    line = _Line(
        str(record["id"] if record["id"] is not None else record["key"]),
        record["index"],
        record["sample"],
        record["text"] or "",
        record["finish_reason"],
        None if stop is None else str(stop),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["cached_tokens"],
        None if spec is None else _spec_of(spec, usage["completion_tokens"]),
        record["error"],
        record["input"] or {},
    )
    return [line]


def _answers_of_batch(record: dict[str, Any]) -> list[_Line]:
    name, response = str(record["custom_id"]), record["response"]
    if response is None or response["status_code"] != 200:
        error = record["error"] if response is None else response["body"]["error"]
        return [_Line(name, None, None, "", "error", None, 0, 0, 0, None, error, {})]
    body = response["body"]
    usage, choices = body["usage"], body["choices"]
    lines = []
    for number, choice in enumerate(choices):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        num_tokens = usage["completion_tokens"] // len(choices)  # a request's answers are counted together
        lines.append(
            _Line(
                name,
                None,
                number,
                text,
                choice["finish_reason"],
                None,
                usage["prompt_tokens"],
                num_tokens,
                0,
                None,
                None,
                {},
            )
        )
    return lines


def _spec_of(spec: Mapping[str, Any], num_tokens: int) -> SpecStats:
    names = ("steps", "drafted", "accepted")
    return SpecStats(
        **{name: spec[name] for name in names},
        emitted=num_tokens,
        accepted_per_pos=list(spec["accepted_per_pos"]),
        drafted_per_pos=list(spec["drafted_per_pos"]),
    )


def _shown(line: _Line) -> dict[str, Any]:
    return {
        "id": line.name,
        "index": line.index,
        "sample": line.sample,
        "finish_reason": line.finish_reason,
        "tokens": line.completion_tokens,
        "steps": line.spec.steps if line.spec is not None else None,
        "acceptance_rate": round(line.spec.acceptance_rate, 4) if line.spec is not None else None,
        "mean_accepted_length": round(line.spec.mean_accepted_length, 4) if line.spec is not None else None,
        "text": line.text[:_TEXT_SHOWN],
    }


def _slice(groups: dict[str, _Group], value: object) -> _Group:
    name = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name not in groups and len(groups) >= _NUM_SLICES:
        name = "(others)"
    return groups.setdefault(name[:_TEXT_SHOWN], _Group())


def _sliced(groups: Mapping[str, _Group]) -> list[dict[str, Any]]:
    ordered = sorted(groups.items(), key=lambda item: -item[1].answers)
    return [{"value": name} | group.as_dict() for name, group in ordered]


def _bins(lengths: Counter[int]) -> list[dict[str, int]]:
    """Return equal ranges of lengths with how many have them."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // _NUM_BINS)
    counts = Counter((length - low) // width for length in lengths.elements())
    return [
        {"from": low + width * number, "to": low + width * (number + 1) - 1, "count": counts[number]}
        for number in range((high - low) // width + 1)
    ]


def _over_time(manifest: Manifest | None) -> list[dict[str, Any]]:
    """Return what happened between two moments of the runs that made the output, one run after the other."""
    found: list[dict[str, Any]] = []
    start = 0.0
    for session in manifest.content["sessions"] if manifest is not None else []:
        before: list[float] = [0.0, 0, 0, 0, 0]
        for point in session.get("series", []):
            seconds, samples, tokens, drafted, accepted = (now - was for now, was in zip(point, before, strict=True))
            if seconds > 0:
                found.append(
                    {
                        "seconds": round(start + point[0], 1),
                        "answers": samples,
                        "tokens_per_second": round(tokens / seconds, 2),
                        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
                    }
                )
                before = point
        start += before[0]
    return found
