"""Says how far the weights of a model are while it is loaded."""

import time

from specgen.cli.render import Console

_LINE_SECONDS = 2.0


class LoadView:
    """A note every few seconds with bytes and rate; nothing for what is loaded sooner. Called from any thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._last = time.perf_counter()

    def __call__(self, num_bytes: int, total: int) -> None:
        """`num_bytes` of `total` are there."""
        now = time.perf_counter()
        is_end = num_bytes == total and self._last > self._started
        if now - self._last < _LINE_SECONDS and not is_end:
            return
        self._last = now
        rate = num_bytes / max(1e-9, now - self._started)
        self._console.note(f"weights: {num_bytes / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s")
