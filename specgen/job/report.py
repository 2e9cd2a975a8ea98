"""What an output says about its run: what is counted over its lines (`tally.py`), and what its manifest knows.

Knows the forms of lines, and manifests. Does not know how figures are shown (`report_page.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.errors import InputError
from specgen.job.manifest import Manifest
from specgen.job.tally import Line, Tally
from specgen.stats import SpecStats


def make_report(output: str, by: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of the output at `output`; `by` names columns of the input to slice them by.

    Raises: InputError if the output cannot be read or is none, or no row has a column of that name.
    """
    manifest = Manifest.read(output)
    tally = Tally(by)
    whole = tally.whole
    for line in _lines(output):
        if line is None:
            tally.num_unreadable += 1
        else:
            tally.add(line)
    if not whole.answers and manifest is None:
        raise InputError("there are no answers in it", where=output, hint="it takes an output of `specgen run`")
    for name, groups in tally.slices.items():
        if whole.answers and not groups:
            raise InputError(f"no row has a column {name!r}", where="--by")
    sessions = manifest.content["sessions"] if manifest is not None else []
    if whole.answers > whole.failed and not whole.spec.steps:  # a batch's lines do not say; the manifest does
        for session in sessions:
            whole.spec.add(_spec_of_run(session))
    return {
        "output": output,
        "complete": manifest.content["complete"] if manifest is not None else None,
        "unreadable_lines": tally.num_unreadable,
        **tally.as_dict(),
        "runs": [_run(session) for session in sessions],
        "over_time": _over_time(sessions),
        "manifest": manifest.content if manifest is not None else None,
    }


def _lines(output: str) -> Iterator[Line | None]:
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


def _answers_in(record: dict[str, Any]) -> list[Line]:
    if "custom_id" in record:
        return _answers_of_batch(record)
    usage, spec, stop = record["usage"], record["spec"], record["stop"]
    line = Line(
        None if record["id"] is None else str(record["id"]),
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


def _answers_of_batch(record: dict[str, Any]) -> list[Line]:
    name, response = str(record["custom_id"]), record["response"]
    if response is None or response["status_code"] != 200:
        error = record["error"] if response is None else response["body"]["error"]
        return [Line(name, None, None, "", "error", None, 0, 0, 0, None, error, {})]
    body = response["body"]
    usage, choices = body["usage"], body["choices"]
    lines = []
    for number, choice in enumerate(choices):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        each, rest = divmod(usage["completion_tokens"], len(choices))  # a request's answers are counted together
        lines.append(
            Line(
                name,
                None,
                number,
                text,
                choice["finish_reason"],
                None,
                usage["prompt_tokens"],
                each + (number < rest),
                usage["prompt_tokens_details"]["cached_tokens"],
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


def _spec_of_run(session: Mapping[str, Any]) -> SpecStats:
    statistics = session.get("statistics")
    return SpecStats() if not statistics else _spec_of(statistics["spec"], statistics["usage"]["completion_tokens"])


def _run(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a session of the manifest did; one that was killed may not say."""
    statistics = session.get("statistics") or {}
    return {
        "started": session["started"],
        "ended": session.get("ended"),
        "host": session.get("host"),
        "device": session["device"].get("device"),
        "answers": statistics.get("samples"),
        "failed": statistics.get("failed"),
        "seconds": statistics.get("wall_seconds"),
        "tokens_per_second": statistics.get("tokens_per_second"),
        "changed": session.get("changed", []),
        "error": session.get("error"),
    }


def _over_time(sessions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what happened between two moments of the runs that made the output, one run after the other."""
    found: list[dict[str, Any]] = []
    start = 0.0
    for number, session in enumerate(sessions, start=1):
        before: list[float] = [0.0, 0, 0, 0, 0]
        for point in session.get("series", []):
            seconds, samples, tokens, drafted, accepted = (now - was for now, was in zip(point, before, strict=True))
            if seconds > 0:
                found.append(
                    {
                        "run": number,
                        "seconds": round(start + point[0], 1),
                        "answers": samples,
                        "tokens_per_second": round(tokens / seconds, 2),
                        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
                    }
                )
                before = point
        start += before[0]
    return found
