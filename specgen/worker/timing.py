"""Seconds spent in the parts of a step: device time on CUDA (events, read later), wall time on the CPU.

A decode step that runs as one CUDA graph is one launch, so its parts cannot be timed from outside. The capture records
events between them as nodes of the graph (`torch.cuda.Event(external=True)`); every graph records the same few, and
`detailed` steps wait for their end and read them before the next replay writes them anew.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# `graph`: a whole decode step launched as one CUDA graph; the others are the parts of any other step
PARTS = ("graph", "target", "sampling", "draft")
# How many of the last steps of a size are remembered one by one.
_REMEMBERED = 4096
# Parts within a decode step, however it was launched.
STEP_PARTS = ("target", "sampling", "draft")

_Mark = tuple[str, "torch.cuda.Event | float"]


@dataclass(slots=True)
class DecodeTimes:
    """Sums over the decode-only steps of one number of rows.

    seconds: of `steps`, from a step's first operation to its last. period_seconds: of `periods`, from the start of a
    step to the start of the decode-only step right after it that goes on with its rows, the gap between them included.
    part_seconds: of `timed_steps`, whose parts are known. last_seconds, last_periods: the same of the last steps, one
    by one.
    """

    steps: int = 0
    seconds: float = 0.0
    periods: int = 0
    period_seconds: float = 0.0
    timed_steps: int = 0
    part_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    last_seconds: list[float] = field(default_factory=list, repr=False)
    last_periods: list[float] = field(default_factory=list, repr=False)

    @property
    def median_seconds(self) -> float:
        """Of a step, from its first operation to its last; the mean where single steps are not remembered."""
        return statistics.median(self.last_seconds) if self.last_seconds else self.seconds / self.steps

    @property
    def median_period(self) -> float:
        """From the start of a step to the start of the next, likewise."""
        return statistics.median(self.last_periods) if self.last_periods else self.period_seconds / self.periods

    def since(self, before: DecodeTimes) -> DecodeTimes:
        """What came on top of `before`, which was this."""
        return DecodeTimes(
            self.steps - before.steps,
            self.seconds - before.seconds,
            self.periods - before.periods,
            self.period_seconds - before.period_seconds,
            self.timed_steps - before.timed_steps,
            {part: value - before.part_seconds[part] for part, value in self.part_seconds.items()},
            _last(self.last_seconds, self.steps - before.steps),
            _last(self.last_periods, self.periods - before.periods),
        )


@dataclass(slots=True)
class _Step:
    """The marks of one step; `decode_rows` 0 says that it was not a decode-only one.

    continues: some of its rows were there before it.
    """

    decode_rows: int
    continues: bool = True
    marks: list[_Mark] = field(default_factory=list)
    inner: dict[str, float] | None = None


class StepTimer:
    """Marks within a step; sums by part of the time from each mark to the next.

    `detailed`: whether a graph's parts are read, for which each step is waited for. `on_part` is told of every part
    that begins, and with "" of the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.detailed = False
        self.on_part: Callable[[str], None] | None = None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._decode: dict[int, DecodeTimes] = {}
        self._is_cuda = device.type == "cuda"
        self._step = _Step(0)
        self._pending: deque[_Step] = deque()
        self._lock = threading.Lock()  # of what is pending, and of the sums
        self._last: _Step | None = None
        self._inner: list[_Mark] = []
        if self._is_cuda:
            self._inner = [(part, torch.cuda.Event(enable_timing=True, external=True)) for part in (*STEP_PARTS, "")]

    def begin_step(self, decode_rows: int, continues: bool = True) -> None:
        """Starts a step; `decode_rows`: its rows if all of them only decode, else 0.

        continues: some of them were there before. If not, the engine may have had nothing to do since the last step.
        """
        self._step = _Step(decode_rows, continues)

    def begin(self, part: str) -> None:
        """Starts a part; what was running ends."""
        self._mark(part)

    def mark_captured(self, part: str) -> None:
        """Marks the start of a part, or with "" the end of the last, from within a step that a graph captures."""
        for name, event in self._inner:
            if name == part:
                assert not isinstance(event, float)
                event.record()

    def end(self) -> None:
        """Ends the step, and adds up the steps before it that the device has finished."""
        self._mark("")
        step = self._step
        if self.detailed and self._is_cuda and step.marks[0][0] == "graph":
            _, last = step.marks[-1]
            assert not isinstance(last, float)
            last.synchronize()
            step.inner = _by_part(self._inner)
        with self._lock:
            self._pending.append(step)
            while self._pending and self._is_done(self._pending[0]):
                self._add(self._pending.popleft())

    @property
    def seconds(self) -> dict[str, float]:
        """The sums by part; on CUDA the last step or two may be missing. May be read from any thread."""
        return dict(self._seconds)

    @property
    def decode_times(self) -> dict[int, DecodeTimes]:
        """The sums over decode-only steps, by their number of rows, as copies.

        Waits for the steps that were launched, so that none is counted later. May be read from any thread.
        """
        with self._lock:
            while self._pending:
                _, last = self._pending[0].marks[-1]
                if not isinstance(last, float):
                    last.synchronize()
                self._add(self._pending.popleft())
        return {rows: times.since(DecodeTimes()) for rows, times in list(self._decode.items())}

    def _mark(self, part: str) -> None:
        if self.on_part is not None:
            self.on_part(part)
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._step.marks.append((part, event))
        else:
            self._step.marks.append((part, time.perf_counter()))

    def _add(self, step: _Step) -> None:
        parts = _by_part(step.marks)
        for part, seconds in parts.items():
            self._seconds[part] += seconds
        if step.decode_rows:
            times = self._decode.setdefault(step.decode_rows, DecodeTimes())
            times.steps += 1
            seconds = sum(parts.values())
            times.seconds += seconds
            _remember(times.last_seconds, seconds)
            inner = parts if "graph" not in parts else step.inner
            if inner is not None:
                times.timed_steps += 1
                for part in STEP_PARTS:
                    times.part_seconds[part] += inner.get(part, 0.0)
            if self._last is not None and self._last.decode_rows and step.continues:
                before = self._decode[self._last.decode_rows]
                before.periods += 1
                period = _seconds_between(self._last.marks[0][1], step.marks[0][1])
                before.period_seconds += period
                _remember(before.last_periods, period)
        self._last = step

    @staticmethod
    def _is_done(step: _Step) -> bool:
        last = step.marks[-1][1]
        return isinstance(last, float) or last.query()


def _remember(values: list[float], value: float) -> None:
    """Appends, and now and then forgets the oldest half."""
    values.append(value)
    if len(values) >= 2 * _REMEMBERED:
        del values[:_REMEMBERED]


def _last(values: list[float], num: int) -> list[float]:
    return values[max(0, len(values) - num) :]


def _by_part(marks: list[_Mark]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for (part, start), (_, end) in itertools.pairwise(marks):
        parts[part] = parts.get(part, 0.0) + _seconds_between(start, end)
    return parts


def _seconds_between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3
