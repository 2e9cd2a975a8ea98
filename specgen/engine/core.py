"""The engine's loop: take new requests, schedule, run, sample, take results back.

    run_busy_loop
    ├─ _process_input_queue            new requests and aborts
    └─ _process_engine_step
       ├─ step / step_with_batch_queue
       │  ├─ Scheduler.schedule              who runs, how many tokens, slots with lookahead
       │  ├─ Executor.execute_model          target forward; the worker keeps the hidden states
       │  ├─ Executor.sample_tokens          sample, verify, update, propose the next drafts
       │  ├─ RepeatLimit.round_done          how often the next decode steps run, where that may change
       │  ├─ Scheduler.update_from_output    append, stop checks, publish full blocks
       │  └─ DraftLength.step_done           how many drafts the next steps make, likewise
       └─ post_step                          drafts back to the scheduler (synchronous mode only)

With asynchronous scheduling a second step is scheduled from optimistic counts while the first one runs.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from specgen.engine.draft_length import DraftLength
from specgen.engine.executor import Executor, StepResult
from specgen.engine.repetition import RepeatLimit
from specgen.engine.request import EngineOutput, EngineRequest
from specgen.engine.scheduler import Scheduler
from specgen.engine.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

BATCH_QUEUE_SIZE = 2


class Add(NamedTuple):
    """Input: a request to run."""

    request: EngineRequest


class Abort(NamedTuple):
    """Input: requests to end now."""

    request_ids: tuple[int, ...]


class Stop(NamedTuple):
    """Input: leave the loop, when all requests are done (`drain`) or after aborting what is left."""

    drain: bool


Input = Add | Abort | Stop


class EngineCore:
    """Scheduler and executor under one loop. Any thread may fill `input_queue`; outputs go to `on_outputs`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        on_outputs: Callable[[list[EngineOutput]], None],
        check_every_step: bool = False,
        draft_length: DraftLength | None = None,
        repeat_limit: RepeatLimit | None = None,
    ) -> None:
        """The loop runs in the thread that calls `run_busy_loop`, and calls `on_outputs` from it.

        `draft_length` chooses how many drafts a step makes, `repeat_limit` (asynchronous mode only) how often a decode
        step runs before its results are looked at; None: the scheduler's numbers.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.input_queue: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self.num_steps = 0
        self._on_outputs = on_outputs
        self._check_every_step = check_every_step
        assert repeat_limit is None or scheduler.config.async_scheduling, "else every step is looked at"
        self._draft_length = draft_length
        self._repeat_limit = repeat_limit
        self._batch_queue: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._last_step: SchedulerOutput | None = None
        self._stopping = False
        self._step_fn = self.step_with_batch_queue if scheduler.config.async_scheduling else self.step

    def run_busy_loop(self) -> None:
        """Works until a `Stop` is taken from the input queue and done; can be entered again."""
        self._stopping = False
        while True:
            self._process_input_queue()
            if self._stopping and not self._has_work():
                return
            self._process_engine_step()

    def _has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._batch_queue)

    def _process_input_queue(self) -> None:
        """Takes all inputs that are there; blocks for one only if there is nothing else to do."""
        while True:
            try:
                item = self.input_queue.get(block=not self._has_work() and not self._stopping)
            except queue.Empty:
                return
            if isinstance(item, Add):
                rejected = self.scheduler.add_request(item.request)
                if rejected is not None:
                    self._on_outputs([rejected])
            elif isinstance(item, Abort):
                self._abort(item.request_ids)
            else:
                self._stopping = True
                if not item.drain:
                    self._abort(tuple(self.scheduler.requests))

    def _abort(self, request_ids: Iterable[int]) -> None:
        outputs = [output for i in request_ids if (output := self.scheduler.abort(i)) is not None]
        if outputs:
            self._on_outputs(outputs)

    def _process_engine_step(self) -> None:
        outputs = self._step_fn()
        if outputs:
            self._on_outputs(outputs)
        self.post_step()
        if self._check_every_step:
            self.scheduler.check()

    def step(self) -> list[EngineOutput]:
        """Schedules one step, runs it, waits for it and takes its results."""
        self._last_step = None
        if not self.scheduler.has_requests():
            return []
        step = self.scheduler.schedule()
        if not step.rows:
            assert step.ended, "requests are waiting and nothing can be scheduled"
            return step.ended
        self.executor.execute_model(step)
        result = self.executor.sample_tokens().get()
        self.num_steps += 1
        self._last_step = step
        return step.ended + self._take(step, result)

    def _take(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Hands a step's results to the scheduler."""
        outputs = self.scheduler.update_from_output(step, result)
        if self._draft_length is not None:
            self._draft_length.step_done(step, result.num_accepted)
            self.scheduler.draft_limit = self._draft_length.limit
        return outputs

    def post_step(self) -> None:
        """Hands the new drafts to the scheduler (synchronous mode; else they never leave the device)."""
        if self._last_step is not None and self._last_step.num_spec_tokens:
            drafts = self.executor.take_draft_token_ids()
            self.scheduler.update_draft_token_ids(self._last_step, drafts)

    def step_with_batch_queue(self) -> list[EngineOutput]:
        """Fills the queue of steps in flight first; full, or with nothing to add, takes the oldest's results."""
        ended: list[EngineOutput] = []
        if len(self._batch_queue) < BATCH_QUEUE_SIZE and self.scheduler.has_schedulable():
            step = self.scheduler.schedule()
            ended = step.ended
            if step.rows:
                self.executor.execute_model(step)
                if not self._batch_queue and self._repeat_limit is not None:
                    self._repeat_limit.restart()
                self._batch_queue.append((step, self.executor.sample_tokens()))
                self.num_steps += step.times
                if len(self._batch_queue) < BATCH_QUEUE_SIZE:
                    return ended
        if not self._batch_queue:
            assert ended or not self.scheduler.has_requests(), "requests are waiting and nothing can be scheduled"
            return ended
        step, result = self._batch_queue.popleft()
        return ended + self._take(step, self._wait_for(step, result))

    def _wait_for(self, step: SchedulerOutput, result: StepResult) -> ModelRunnerOutput:
        waited: float | None = result.wait()
        output = result.get()
        if self._repeat_limit is not None:
            if self._batch_queue and self._batch_queue[-1][0].is_long:
                waited = None  # the device's queue is full of its launches, and the host waited there
            self._repeat_limit.round_done(step, output, waited, time.perf_counter())
            self.scheduler.repeat_limit = self._repeat_limit.limit
        return output
