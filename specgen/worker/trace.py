"""A trace of some steady decode steps, host and device, for Perfetto or chrome://tracing.

Runs in the thread that runs the steps: torch's profiler sees the host's side of its own thread only.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Steps of the wanted size before the profiler starts, and steps that it runs along without keeping them.
_SETTLE_STEPS = 3
_WARM_UP_STEPS = 3


def prepare_profiler() -> None:
    """Sets torch's profiler up. To be called from the main thread: first used from another, it complains on stderr."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


class StepTrace:
    """Profiles `num_steps` steps in a row that decode `num_rows` rows and writes `path`, once."""

    def __init__(self, path: Path, num_rows: int, num_steps: int) -> None:
        """Waits for `before_step`."""
        self.is_done = False
        self._path = path
        self._num_rows = num_rows
        self._num_steps = num_steps
        self._seen = 0
        self._profiler: torch.profiler.profile | None = None

    @staticmethod
    def steps_for(num_available: int, most: int = 32) -> int:
        """How many steps to trace where `num_available` come in a row; 0 if they are too few."""
        return min(most, num_available - _SETTLE_STEPS - _WARM_UP_STEPS - 2) if num_available >= 10 else 0

    def before_step(self, decode_rows: int) -> None:
        """Told of every step, before it; `decode_rows` is 0 if it does more than decode."""
        if self.is_done:
            return
        if self._profiler is not None:
            self._profiler.step()
            if decode_rows != self._num_rows and not self.is_done:
                logger.warning("the rows that were traced ended early")
                self.stop()
        elif decode_rows != self._num_rows:
            self._seen = 0
        else:
            self._seen += 1
            if self._seen > _SETTLE_STEPS:
                self._start()

    def stop(self) -> None:
        """Ends it, finished or not."""
        self.is_done = True
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=_WARM_UP_STEPS, active=self._num_steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # there is one cycle: nothing to warn of
        )
        self._profiler.start()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.is_done = True
        profiler.export_chrome_trace(str(self._path))
