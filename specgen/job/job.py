"""The loop between rows and an engine: rows in as the engine takes them, lines out as answers end.

Knows the engine only as the `Engine` protocol, so that it can be tested with a scripted one. Prints nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specgen.engine.request import EngineOutput, EngineRequest, TokenLogprob
from specgen.errors import RowError
from specgen.job.plan import Plan
from specgen.job.prompts import Prompt, PromptBuilder
from specgen.job.read_ahead import ReadAhead
from specgen.job.record import Answer, Form
from specgen.job.watchdog import Watchdog
from specgen.job.writer import MAX_HELD_LINES, LineWriter
from specgen.recipe import Recipe
from specgen.stats import RunStats, SpecStats
from specgen.stops import answer_text, stop_check_of
from specgen.tokenizer import Tokenizer

# Seconds to wait for outputs, and for a row while nothing runs: how late an interruption or a slow pipe is noticed.
_POLL_SECONDS = 0.1
# Samples given to the engine, as a multiple of those it runs at once: some must wait in it, or it would idle.
_FEED_FACTOR = 2
# Rows among which those with a common beginning are brought together.
_GROUP_WINDOW = 4096


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
        """Return counters: steps, seconds in target, sampling and draft, preemptions; kv_usage is a share."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job stands. seconds since it began; completion_tokens of all samples, unfinished ones included.

    finished_tokens: of the samples that have ended. spec: counts of those. error_codes: of those that failed.
    """

    rows_done: int
    samples_done: int
    failed: int
    completion_tokens: int
    finished_tokens: int
    running: int
    waiting: int
    seconds: float
    spec: SpecStats
    kv_usage: float | None = None
    error_codes: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a step of the samples that have ended."""
        return self.spec.mean_accepted_length


@dataclass(slots=True)
class _RunningRow:
    """A row in the engine: its samples that have not ended, and the slot of its first line."""

    plan: Plan
    prompt: Prompt
    slot: int
    num_left: int


@dataclass(slots=True)
class _Active:
    """A sample in the engine."""

    row: _RunningRow
    sample: int
    slot: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None


class Job:
    """One run of a recipe: planned rows from `source` through `engine` to `writer`, as lines of `form`.

    stop: set it (from a signal handler) to end early: no row is begun, what runs is dropped or finished, as the recipe
    says, and the stats say `interrupted`. on_progress: called at least every tenth of a second or so. is_complete:
    whether it ended with a line for every answer, stopped neither by `stop` nor by a failed row.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        source: ReadAhead[Plan],
        writer: LineWriter,
        form: Form,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.stats = RunStats()
        self.is_complete = False
        self._recipe = recipe
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._source = source
        self._writer = writer
        self._form = form
        self._stop = stop or threading.Event()
        self._on_progress = on_progress
        self._watchdog = Watchdog(recipe.engine.watchdog_seconds)
        self._active: dict[int, _Active] = {}
        self._ready: deque[_RunningRow] = deque()
        self._num_requests = 0
        self._num_slots = 0
        self._tokens_seen = 0
        self._max_active = _FEED_FACTOR * recipe.engine.max_num_seqs
        self._stopped_by_error = False

    def run(self) -> RunStats:
        """Run until every row has its lines, a row failed under `on_error: stop`, or `stop` was set.

        Raises: EngineError if the engine died or stands still, InputError if the input or output broke; what finished
        is written first.
        """
        for _ in self.steps():
            pass
        return self.stats

    def steps(self) -> Generator[None]:
        """Do what `run` does, a step at a time."""
        started = time.perf_counter()
        try:
            while self._step():
                self._report(time.perf_counter() - started)
                yield
            self.is_complete = not (self.stats.interrupted or self._stopped_by_error)
        finally:
            self._source.close()
            if self._active:
                self._engine.abort(list(self._active))
                self._active.clear()
            self.stats.wall_seconds = time.perf_counter() - started
            self._writer.write_held()
        self.stats.engine = dict(self._engine.engine_stats())
        self._report(self.stats.wall_seconds)

    def _step(self) -> bool:
        """Admit rows, take outputs, write lines; returns whether there is more to do."""
        if self._stop.is_set():
            if not self.stats.interrupted:
                self.stats.interrupted = True
                self._drop_waiting()
            if self._recipe.output.on_interrupt == "drop" or not self._active:
                return False
        else:
            self._admit()
        if self._active and not self._stopped_by_error:
            outputs = self._engine.get_outputs(timeout=_POLL_SECONDS)
            self._watchdog.look(self._engine, bool(outputs), len(self._active))
            for output in outputs:
                self._take(output)
        else:
            self._watchdog.rest()
        self._writer.flush()
        return not self._stopped_by_error and bool(self._active or self._ready or not self._source.exhausted)

    # rows in

    def _admit(self) -> None:
        """Give the engine rows while it has use for them and lines may still wait, a bounded number a step.

        Where nothing runs, a row is begun however many lines wait: `group_prefixes` may have put the row they wait for
        behind others.
        """
        for _ in range(self._max_active):
            is_full = self._writer.num_held >= MAX_HELD_LINES and bool(self._active)
            if is_full or len(self._active) >= self._max_active:
                return
            if not self._ready and not self._prepare():
                return
            if self._ready:
                self._start(self._ready.popleft())

    def _prepare(self) -> bool:
        """Make the next row ready, or a window of them in the order of their tokens; whether there was any."""
        groups = self._recipe.engine.group_prefixes
        for number in range(_GROUP_WINDOW if groups else 1):
            wait = 0.0 if self._active or number else _POLL_SECONDS
            plan = self._source.get(timeout=wait)
            if plan is None or self._stopped_by_error:
                if not number:
                    return False
                break
            slot = self._num_slots
            try:
                prompt = self._prompts.build_planned(plan)
            except RowError as error:
                self._num_slots += 1
                self._write(plan, Answer(None, error=error), slot, is_last=True)
                continue
            self._num_slots += self._form.num_lines(plan)
            self._ready.append(_RunningRow(plan, prompt, slot, len(plan.samples)))
        if groups:
            self._ready = deque(sorted(self._ready, key=lambda row: row.prompt.token_ids))
        return True

    def _start(self, row: _RunningRow) -> None:
        plan, prompt = row.plan, row.prompt
        has_own_lines = self._form.num_lines(plan) > 1
        for number, sample in enumerate(plan.samples):
            request_id = self._num_requests
            self._num_requests += 1
            self._active[request_id] = _Active(row, sample, row.slot + (number if has_own_lines else 0))
            seed = plan.seed(self._prompts.run_seed, sample) if sample else prompt.seed
            stops = stop_check_of(prompt.params, self._tokenizer)
            self._engine.add_request(EngineRequest(request_id, prompt.token_ids, prompt.params, seed, stops))

    def _drop_waiting(self) -> None:
        """Take back the rows of which no sample has a token yet: to finish them as well would take twice as long."""
        begun = {id(active.row) for active in self._active.values() if active.token_ids}
        waiting = [number for number, active in self._active.items() if id(active.row) not in begun]
        self._engine.abort(waiting)
        for number in waiting:
            del self._active[number]

    # lines out

    def _take(self, output: EngineOutput) -> None:
        active = self._active.get(output.request_id)
        if active is None:
            return  # it was dropped meanwhile
        self._tokens_seen += len(output.new_token_ids)
        active.token_ids.extend(output.new_token_ids)
        if output.logprobs is not None:
            active.logprobs = active.logprobs or []
            active.logprobs.extend(output.logprobs)
        if output.finish_reason is None:
            return
        del self._active[output.request_id]
        self._finish(active, output)

    def _finish(self, active: _Active, output: EngineOutput) -> None:
        """Write the line of a sample that ended; the token that ended it is counted but is no part of the text."""
        row, ids = active.row, active.token_ids
        answer = Answer(
            active.sample,
            token_ids=ids,
            stop=output.stop,
            prompt_tokens=len(row.prompt.token_ids),
            cached_tokens=output.num_cached_tokens,
            spec=output.stats,
            truncated_from=row.prompt.truncated_from,
        )
        if output.finish_reason == "error":
            answer.error = RowError(output.error or "the engine gave no reason", code=output.error_code or "engine")
        elif output.finish_reason == "abort":
            answer.error = RowError("the engine dropped the row", code="aborted")
        else:
            assert output.finish_reason is not None
            answer.finish_reason = output.finish_reason
            answer.spec = output.stats or SpecStats()
            answer.text = answer_text(self._tokenizer, ids, row.prompt.params, output)
            answer.logprobs, answer.prompt_logprobs = active.logprobs, output.prompt_logprobs
            answer.seed = row.plan.seed(self._prompts.run_seed, active.sample) if active.sample else row.prompt.seed
        row.num_left -= 1
        self._write(row.plan, answer, active.slot, is_last=row.num_left == 0)

    def _write(self, plan: Plan, answer: Answer, slot: int, *, is_last: bool) -> None:
        """Write an answer's line, if it completes one, and count the answer."""
        line = self._form.line(plan, answer)
        if line is not None:
            self._writer.put(slot, line)
        self.stats.count_row(
            answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            token_ids=answer.token_ids,
            text=answer.text,
            spec=answer.spec,
            error_code=answer.error.code if answer.error is not None else None,
            ends_row=is_last,
        )
        if answer.error is not None and self._recipe.output.on_error == "stop":
            self._stopped_by_error = True

    def _report(self, seconds: float) -> None:
        self.stats.wall_seconds = seconds
        if self._on_progress is None:
            return
        kv_usage = self._engine.engine_stats().get("kv_usage")
        self._on_progress(
            Progress(
                rows_done=self.stats.rows,
                samples_done=self.stats.samples,
                failed=self.stats.failed,
                completion_tokens=self._tokens_seen,
                finished_tokens=self.stats.completion_tokens,
                running=self._engine.num_running,
                waiting=self._engine.num_waiting,
                seconds=seconds,
                spec=self.stats.spec,
                kv_usage=kv_usage if isinstance(kv_usage, float) else None,
                error_codes=self.stats.error_codes,
            )
        )
