"""Says how far a model is while it is loaded, and its kernels while they are compiled."""

import time

from specgen.cli.render import Console

_LINE_SECONDS = 2.0


class LoadView:
    """A note every few seconds; nothing for what is done sooner. Called from any thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = {"weights": time.perf_counter()}
        self._last = dict(self._started)

    def weights(self, num_bytes: int, total: int) -> None:
        """Of `total` bytes so many are in place: a note with bytes and rate."""
        if (seconds := self._seconds_if_due("weights", num_bytes == total)) is not None:
            rate = num_bytes / max(1e-9, seconds)
            self._console.note(f"weights: {num_bytes / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s")

    def kernels(self, num_compiled: int, total: int) -> None:
        """Of the kernels that are known to be needed, so many are compiled."""
        if (seconds := self._seconds_if_due("kernels", is_end=False)) is not None:  # more may become known
            self._console.note(f"kernels: {num_compiled} of {total} compiled, {seconds:.0f} s")

    def _seconds_if_due(self, what: str, is_end: bool) -> float | None:
        """Seconds since the first call for `what`, if they are worth a note now; the end is, if there was one."""
        now = time.perf_counter()
        started, last = self._started.setdefault(what, now), self._last.setdefault(what, now)
        if now - last < _LINE_SECONDS and not (is_end and last > started):
            return None
        self._last[what] = now
        return now - started
