"""Seconds spent in the parts of a step: device time on CUDA (events, read later), wall time on the CPU."""

from __future__ import annotations

import itertools
import time
from collections import deque

import torch

# `graph`: a whole decode step launched as one CUDA graph; the others are the parts of any other step
PARTS = ("graph", "target", "sampling", "draft")

_Mark = tuple[str, "torch.cuda.Event | float"]


class StepTimer:
    """Marks within a step; sums by part of the time from each mark to the next."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._is_cuda = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._pending: deque[list[_Mark]] = deque()

    def begin(self, part: str) -> None:
        """Starts a part; what was running ends."""
        self._mark(part)

    def end(self) -> None:
        """Ends the step, and adds up the steps before it that the device has finished."""
        self._mark("")
        self._pending.append(self._marks)
        self._marks = []
        while self._pending and self._is_done(self._pending[0]):
            self._add(self._pending.popleft())

    @property
    def seconds(self) -> dict[str, float]:
        """The sums by part; on CUDA the last step or two may be missing. May be read from any thread."""
        return dict(self._seconds)

    def _mark(self, part: str) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def _add(self, marks: list[_Mark]) -> None:
        for (part, start), (_, end) in itertools.pairwise(marks):
            self._seconds[part] += _seconds_between(start, end)

    @staticmethod
    def _is_done(marks: list[_Mark]) -> bool:
        last = marks[-1][1]
        return isinstance(last, float) or last.query()


def _seconds_between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3
