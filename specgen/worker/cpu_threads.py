"""How many threads the CPU's products use, kept at what is faster at the moment.

A step is some hundred short parallel regions. On a quiet machine more threads are faster; as soon as another process
wants a core, every region waits for a thread that is not running (measured on 2 cores: 20 times slower than one
thread). So the engine tries the other count now and then for a step or three, and keeps what wins. Results do not
depend on it: whoever uses this checks that on the model first.
"""

from __future__ import annotations

import logging
import statistics

import torch

logger = logging.getLogger(__name__)

_PROBE_STEPS = 3
_FIRST_INTERVAL = 3
_INTERVAL_AFTER_CHANGE = 32
_LONGEST_INTERVAL = 256
_WINS = 0.9  # share of the present time that a probe must stay below


class CpuThreads:
    """Switches torch between one thread and `most`, by the seconds of alike steps. Used from one thread only."""

    def __init__(self, most: int) -> None:
        """Starts with `most` threads."""
        self.count = most
        self._most = most
        self._interval = _FIRST_INTERVAL
        self._seconds: list[float] = []
        self._baseline: float | None = None  # set while the other count is tried

    @property
    def _other(self) -> int:
        return 1 if self.count == self._most else self._most

    def observe(self, seconds: float) -> None:
        """Takes the time of a step that is like the ones around it, and sets the threads for the next."""
        self._seconds.append(seconds)
        if self._baseline is None:
            if len(self._seconds) >= self._interval:
                self._baseline = statistics.median(self._seconds[-_PROBE_STEPS:])
                self._switch()
        elif self._seconds[-1] > 2 * self._baseline:
            self._settle(won=False)  # no need to see more of it
        elif len(self._seconds) == _PROBE_STEPS:
            self._settle(won=statistics.median(self._seconds) < _WINS * self._baseline)

    def restore(self) -> None:
        """Sets torch back to `most` threads, for whoever computes next in this process."""
        torch.set_num_threads(self._most)

    def _settle(self, won: bool) -> None:
        self._baseline = None
        if won:
            self._interval = _INTERVAL_AFTER_CHANGE
            self._seconds.clear()
            logger.debug("products use %d threads from here on", self.count)
        else:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
            self._switch()

    def _switch(self) -> None:
        self.count = self._other
        torch.set_num_threads(self.count)
        self._seconds.clear()
