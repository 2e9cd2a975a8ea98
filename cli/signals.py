"""What SIGINT and SIGTERM do to a command that loads a model: a clean end with exit code 130 or 143, or one at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from specgen.cli import codes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Watches for both signals while it is entered, in the main thread; elsewhere it does nothing.

    The first one sets `stop` and raises KeyboardInterrupt; while held (`hold`) it only sets `stop`. The second ends the
    process at once. code: the exit code of the last one, 130 or 143. flush: called before the end, so that no line is
    left half written.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.code = codes.INTERRUPTED
        self.flush: Callable[[], None] = lambda: None
        self._is_held = False
        self._before: dict[signal.Signals, object] = {}

    def hold(self) -> None:
        """From now on a first signal only sets `stop`: what runs looks at it, or must not be broken off."""
        self._is_held = True

    def release(self) -> None:
        """From now on a first signal raises again; one that came meanwhile does so here.

        Raises: KeyboardInterrupt.
        """
        self._is_held = False
        if self.stop.is_set():
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        """Start watching."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back who listened before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.code = codes.TERMINATED if number == signal.SIGTERM else codes.INTERRUPTED
        if self.stop.is_set():
            self._exit_now()
        self.stop.set()
        if not self._is_held:
            raise KeyboardInterrupt

    def _exit_now(self) -> None:
        # Any of these may be in the middle of a write, which the signal interrupted: then there is nothing to flush.
        for flush in (self.flush, *(stream.flush for stream in (sys.stdout, sys.stderr) if stream is not None)):
            with suppress(Exception):
                flush()
        with suppress(Exception):
            if sys.stderr.isatty():  # a progress bar hides it
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
        os._exit(self.code)
