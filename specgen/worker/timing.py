"""Seconds spent in the parts of a step: device time on CUDA (events, read later), wall time on the CPU."""

from __future__ import annotations

import time
from collections import deque

import torch

PARTS = ("target", "sampling", "draft")


class StepTimer:
    """Four marks a step; sums of the three parts between them."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0
        self._is_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self._pending: deque[list[torch.cuda.Event | float]] = deque()

    def mark(self) -> None:
        """Sets the next mark of the step: start, after target, after sampling, after draft."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if len(self._marks) == len(PARTS) + 1:
            self._pending.append(self._marks)
            self._marks = []

    def collect(self) -> None:
        """Adds up the oldest step. Its results were read, or a later step's: on CUDA the last event may just be due."""
        marks = self._pending.popleft()
        for part, start, end in zip(PARTS, marks, marks[1:], strict=False):
            if isinstance(start, float):
                assert isinstance(end, float)
                self.seconds[part] += end - start
            else:
                assert not isinstance(end, float)
                end.synchronize()
                self.seconds[part] += start.elapsed_time(end) / 1e3
        self.num_steps += 1

    def drain(self) -> dict[str, float]:
        """All sums, after adding what is still pending."""
        while self._pending:
            self.collect()
        return dict(self.seconds)
