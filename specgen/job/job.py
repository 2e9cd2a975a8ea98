"""The loop between a file and an engine: rows in as the engine takes them, lines out as rows finish.

Knows the engine only as the `Engine` protocol, so that it can be tested with a scripted one. Prints nothing.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import RowError
from specgen.job import record
from specgen.job.prompts import Prompt, PromptBuilder
from specgen.job.readers import BadRow, ReadAhead, Row
from specgen.job.writer import LineWriter
from specgen.recipe import Recipe
from specgen.stats import RunStats, SpecStats
from specgen.tokenizer import TextStream, Tokenizer

# Seconds to wait for outputs, and for a row while nothing runs: how late an interruption or a slow pipe is noticed.
_POLL_SECONDS = 0.1
# Rows given to the engine, as a multiple of those it runs at once: some must wait in it, or it would idle.
_FEED_FACTOR = 2
# Finished lines that may wait for an earlier row, in input order.
_MIN_REORDER_WINDOW = 1024


class Engine(Protocol):
    """What a job needs of an engine; `specgen.engine.client.EngineClient` is one."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_running(self) -> int:
        """Requests that are in a step's batch."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""

    def add_request(self, request: EngineRequest) -> None:
        """Take a request; never blocks."""

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests."""

    def get_outputs(self, timeout: float) -> list[EngineOutput]:
        """Return what finished steps gave, [] if nothing did within `timeout` seconds. Raises: EngineError."""

    def engine_stats(self) -> Mapping[str, object]:
        """Return counters: steps, seconds in target, sampling and draft, preemptions, cached tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job stands. seconds since it began; completion_tokens and spec of all rows, unfinished ones included."""

    rows_done: int
    failed: int
    completion_tokens: int
    running: int
    waiting: int
    seconds: float
    mean_accepted_length: float


@dataclass(slots=True)
class _Active:
    row: Row
    prompt: Prompt
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)


class Job:
    """One run of a recipe: rows from `source` through `engine` to `writer`.

    stop: set it (from a signal handler) to end early: what finished is written, what runs is dropped, and the stats
    say `interrupted`. on_progress: called at least every tenth of a second or so.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: Tokenizer,
        source: ReadAhead,
        writer: LineWriter,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.stats = RunStats()
        self._recipe = recipe
        self._engine = engine
        self._tokenizer = tokenizer
        self._source = source
        self._writer = writer
        self._stop = stop or threading.Event()
        self._on_progress = on_progress
        self._prompts = PromptBuilder(
            recipe, tokenizer, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size
        )
        self._active: dict[int, _Active] = {}
        self._tokens_seen = 0
        self._max_active = _FEED_FACTOR * recipe.engine.max_num_seqs
        self._max_held = max(_MIN_REORDER_WINDOW, 8 * self._max_active)
        self._stopped_by_error = False

    def run(self) -> RunStats:
        """Run until every row has its line, a row failed under `on_error: stop`, or `stop` was set.

        Raises: EngineError if the engine died, InputError if the input or output broke; what finished is written first.
        """
        started = time.perf_counter()
        try:
            while self._step():
                self._report(time.perf_counter() - started)
        finally:
            self._source.close()
            if self._active:
                self._engine.abort(list(self._active))
                self._active.clear()
            self.stats.blank_lines = self._source.reader.blank_lines
            self.stats.wall_seconds = time.perf_counter() - started
            self._writer.write_held()
        self.stats.engine = dict(self._engine.engine_stats())
        self._report(self.stats.wall_seconds)
        return self.stats

    def _step(self) -> bool:
        """Admit rows, take outputs, write lines; returns whether there is more to do."""
        if self._stop.is_set():
            self.stats.interrupted = True
            return False
        self._admit()
        if self._active and not self._stopped_by_error:
            for output in self._engine.get_outputs(timeout=_POLL_SECONDS):
                self._take(output)
        self._writer.flush()
        return not self._stopped_by_error and bool(self._active or not self._source.exhausted)

    def _admit(self) -> None:
        """Give the engine rows while it has use for them and the reorder window has room, a bounded number a step."""
        for _ in range(self._max_active):
            if len(self._active) >= self._max_active or self._writer.num_held >= self._max_held:
                return
            row = self._source.get(timeout=0.0 if self._active else _POLL_SECONDS)
            if row is None or self._stopped_by_error:
                return
            try:
                if isinstance(row, BadRow):
                    raise row.error
                prompt = self._prompts.build(row)
            except RowError as error:
                self._fail(row, error)
                continue
            self._active[row.index] = _Active(row, prompt, self._tokenizer.new_stream())
            self._engine.add_request(EngineRequest(row.index, prompt.token_ids, prompt.params, prompt.seed))

    def _take(self, output: EngineOutput) -> None:
        active = self._active.get(output.request_id)
        if active is None:
            return  # it was dropped meanwhile
        self._tokens_seen += len(output.new_token_ids)
        active.token_ids.extend(output.new_token_ids)
        if output.finish_reason is None:
            active.stream.push(output.new_token_ids)
            return
        del self._active[output.request_id]
        if output.finish_reason == "error":
            self._fail(active.row, RowError(output.error or "the engine gave no reason", code="engine"), active, output)
        elif output.finish_reason == "abort":
            self._fail(active.row, RowError("the engine dropped the row", code="aborted"), active, output)
        else:
            self._finish(active, output)

    def _finish(self, active: _Active, output: EngineOutput) -> None:
        """Write the line of a row that ended; the token that ended it is counted but is no part of the text."""
        assert output.finish_reason is not None
        ended_by_token = output.finish_reason == "stop"
        active.stream.push(output.new_token_ids[:-1] if ended_by_token else output.new_token_ids)
        active.stream.finish()
        spec = output.stats or SpecStats()
        num_prompt = len(active.prompt.token_ids)
        line = record.ok_record(
            active.row,
            text=active.stream.text,
            token_ids=active.token_ids if self._recipe.output.token_ids else None,
            finish_reason=output.finish_reason,
            stop=output.stop,
            usage=record.usage_of(num_prompt, len(active.token_ids), output.num_cached_tokens),
            spec=spec,
            seed=active.prompt.seed,
        )
        self._writer.put(active.row.index, record.to_line(line))
        self.stats.count_row(
            output.finish_reason,
            prompt_tokens=num_prompt,
            cached_tokens=output.num_cached_tokens,
            token_ids=active.token_ids,
            text=active.stream.text,
            spec=spec,
        )

    def _fail(
        self,
        row: Row | BadRow,
        error: RowError,
        active: _Active | None = None,
        output: EngineOutput | None = None,
    ) -> None:
        """Write the line of a row that failed, before (`active` None) or while it ran."""
        num_prompt = len(active.prompt.token_ids) if active else 0
        token_ids = active.token_ids if active else []
        cached = output.num_cached_tokens if output else 0
        spec = output.stats if output else None
        line = record.error_record(
            row,
            error,
            with_token_ids=self._recipe.output.token_ids,
            usage=record.usage_of(num_prompt, len(token_ids), cached),
            spec=spec,
        )
        self._writer.put(row.index, record.to_line(line))
        self.stats.count_row(
            "error",
            prompt_tokens=num_prompt,
            cached_tokens=cached,
            token_ids=token_ids,
            spec=spec,
            error_code=error.code,
        )
        self._stopped_by_error = self._stopped_by_error or self._recipe.output.on_error == "stop"

    def _report(self, seconds: float) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            Progress(
                rows_done=self.stats.rows,
                failed=self.stats.failed,
                completion_tokens=self._tokens_seen,
                running=self._engine.num_running,
                waiting=self._engine.num_waiting,
                seconds=seconds,
                mean_accepted_length=self.stats.spec.mean_accepted_length,
            )
        )
