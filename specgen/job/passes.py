"""One pass of requests through an engine: to its end, timed, or until some of its steps are in a trace.

Knows what a benchmark asks of an engine. Does not know what is compared; prints nothing.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import EngineError
from specgen.job.bench_figures import Round
from specgen.job.job import Engine
from specgen.stats import SpecStats
from specgen.worker.startup import StartUp
from specgen.worker.timing import DecodeTimes

# Seconds between two outputs after which whoever waits for them gives up.
_SILENCE_SECONDS = 300.0
_fresh_ids = itertools.count(1 << 32)


class BenchEngine(Engine, Protocol):
    """What a benchmark needs of an engine beside what a job does."""

    description: dict[str, object]

    def decode_times(self) -> Mapping[int, DecodeTimes]:
        """Return the times of the decode-only steps so far, by number of rows."""

    def start_up(self) -> StartUp:
        """Return where the time went that was no step, so far."""

    def time_parts(self, wanted: bool) -> None:
        """Tell the parts of steps that run as one launch from now on, or no longer."""

    def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
        """Write a trace of `num_steps` of the next steady decode steps of `num_rows` rows."""

    def label_steps(self, wanted: bool) -> None:
        """Run steps one operation at a time from now on, in ranges that a trace shows, or as before."""


def without_prompts(requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    """Return the requests with all but the last token of each prompt given, so that they decode from the first step."""
    return [replace(request, num_given_tokens=len(request.prompt_token_ids) - 1) for request in requests]


def outputs_of(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[list[EngineOutput]]:
    """Hand over all requests, and give what each wait for outputs brings, [] for nothing; it does not end by itself.

    The iterator raises EngineError if the engine does, or gives nothing for too long.
    """
    for request in requests:
        engine.add_request(request)
    return _watched_outputs(engine)


def _watched_outputs(engine: Engine) -> Iterator[list[EngineOutput]]:
    last_output = time.perf_counter()
    while True:
        outputs = engine.get_outputs(timeout=1.0)
        now = time.perf_counter()
        if outputs:
            last_output = now
        elif now - last_output > _SILENCE_SECONDS:
            raise EngineError(f"the engine gave nothing for {_SILENCE_SECONDS:.0f} seconds")
        yield outputs


def drain(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[int, list[int]], SpecStats]:
    """Run all requests to their end; return their ids by request and the summed counts. Raises: EngineError."""
    token_ids: dict[int, list[int]] = {request.request_id: [] for request in requests}
    spec = SpecStats()
    waits = outputs_of(engine, requests)
    num_left = len(requests)
    while num_left:
        for output in next(waits):
            token_ids[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is None:
                continue
            num_left -= 1
            if output.finish_reason not in ("stop", "length"):
                raise EngineError(f"row {output.request_id} failed: {output.error}")
            if output.stats is not None:
                spec.add(output.stats)
    return token_ids, spec


def timed(engine: BenchEngine, requests: Sequence[EngineRequest]) -> Round:
    """Run all requests to their end; return what it took. Raises: EngineError."""
    before, decode_before = _numbers(engine.engine_stats()), engine.decode_times()
    started = time.perf_counter()
    token_ids, spec = drain(engine, requests)
    seconds = time.perf_counter() - started
    gained = {name: value - before.get(name, 0.0) for name, value in _numbers(engine.engine_stats()).items()}
    decode = {
        rows: new
        for rows, times in engine.decode_times().items()
        if (new := times.since(decode_before.get(rows, DecodeTimes()))).steps
    }
    return Round(seconds, sum(map(len, token_ids.values())), spec, gained, token_ids, decode)


def traced(engine: BenchEngine, requests: Sequence[EngineRequest], path: Path, num_rows: int, num_steps: int) -> bool:
    """Run requests until `path` holds a trace of so many steady steps; False if they ended before one began.

    Raises: EngineError if a row fails.
    """
    path.unlink(missing_ok=True)  # of an earlier run
    engine.trace_steps(path, num_rows, num_steps)
    # a step in flight may still give tokens to those that are aborted: their ids are not met again
    requests = [replace(request, request_id=next(_fresh_ids)) for request in requests]
    waits = outputs_of(engine, requests)
    left = {request.request_id for request in requests}
    is_aborted, num_idle = False, 0
    while left and num_idle < 2:
        if not is_aborted and path.is_file():
            # the rest says nothing new, and every number of rows on the way to none would be captured as a graph
            engine.abort(list(left))
            is_aborted = True
        outputs = next(waits)
        for output in outputs:
            if output.finish_reason is not None:
                left.discard(output.request_id)
            if output.finish_reason == "error":
                raise EngineError(f"row {output.request_id} failed: {output.error}")
        num_idle = num_idle + 1 if is_aborted and not outputs and not engine.num_running else 0
    return path.is_file()


def _numbers(stats: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in stats.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
