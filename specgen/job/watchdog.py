"""Notices that an engine has stopped making progress, and says what it was doing.

Knows time, the engine's counters and this process's threads.
"""

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Protocol

from specgen.errors import EngineStuckError

# Steps that give nobody a token are progress (long prompts take several), but not for so many times the limit.
_MOST_SILENT = 10


class _Watched(Protocol):
    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def engine_stats(self) -> Mapping[str, object]: ...


class Watchdog:
    """Raises once an engine with work has made no step for `seconds`, or no token for ten times that; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._num_steps: object = None
        self._last_step = self._last_output = time.monotonic()

    def rest(self) -> None:
        """Tell that the engine has nothing to do."""
        self._last_step = self._last_output = time.monotonic()

    def look(self, engine: _Watched, gave_outputs: bool, num_requests: int) -> None:
        """Tell whether the engine gave outputs when it was last asked.

        Raises: EngineStuckError, with the engine's state in `dump`.
        """
        now = time.monotonic()
        if gave_outputs or self._seconds is None:
            self._last_step = self._last_output = now
            return
        num_steps = engine.engine_stats().get("steps")
        if num_steps != self._num_steps:
            self._num_steps, self._last_step = num_steps, now
        silent, still = now - self._last_output, now - self._last_step
        if still < self._seconds and silent < _MOST_SILENT * self._seconds:
            return
        what = f"made no step for {still:.0f} s" if still >= self._seconds else f"gave no token for {silent:.0f} s"
        raise EngineStuckError(
            f"the engine {what} with {num_requests} requests in it",
            hint="what had finished is written; the same command resumes. engine.watchdog_seconds sets the limit",
            dump=_state(engine),
        )


def _state(engine: _Watched) -> str:
    """Return counters and where every thread stands, as text."""
    lines = [f"running {engine.num_running}, waiting {engine.num_waiting}"]
    lines += [f"{name} {value}" for name, value in engine.engine_stats().items()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return "\n".join(lines)
