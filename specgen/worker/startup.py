"""Where the time goes before and between the first steps: weights, the measured step, graphs, and Triton's compiler.

Graphs are captured when they are first used. Kernels are compiled side by side before the measured step, where steps
are captured, or when they are first used, within a capture or a step that has no graph: what is counted as compiling is
part of what is counted there, but for threads, whose seconds add up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from specgen.kernels._triton import HAS_TRITON


class Progress(Protocol):
    """Who is told how far a worker's start is, from any thread."""

    def weights(self, num_bytes: int, total: int) -> None:
        """Of `total` bytes so many are in place."""
        ...

    def kernels(self, num_compiled: int, total: int) -> None:
        """Of the kernels that are known to be needed, so many are compiled."""
        ...


class StartUp(NamedTuple):
    """Seconds and counts since an engine was begun, so far.

    weight_bytes, weight_seconds: read, or made, and put in place. largest_step_seconds: kernels compiled ahead, and the
    step that sizes the KV pool. ready_seconds: until the engine took requests. num_graphs, graph_seconds: captured,
    each run once before. num_compiled, compile_seconds: Triton kernels; num_cached: those of them that its cache on
    disk had.
    """

    weight_bytes: int = 0
    weight_seconds: float = 0.0
    largest_step_seconds: float = 0.0
    ready_seconds: float = 0.0
    num_graphs: int = 0
    graph_seconds: float = 0.0
    num_compiled: int = 0
    num_cached: int = 0
    compile_seconds: float = 0.0


@dataclass(slots=True)
class CompileClock:
    """What Triton compiled in this process since it was watched; kernels found on disk are among `num_compiled`."""

    num_compiled: int = 0
    num_cached: int = 0
    seconds: float = 0.0
    before: Callable[..., None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """Triton's listener: `times.total` is in microseconds."""
        with self.lock:
            self.num_compiled += 1
            self.num_cached += cache_hit
            self.seconds += times.total / 1e6
        if self.before is not None:
            self.before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)


@functools.cache
def compile_clock() -> CompileClock:
    """The process's clock: from the first call on Triton tells it. Stays at 0 where there is no Triton."""
    clock = CompileClock()
    if HAS_TRITON:
        from triton import knobs

        clock.before = knobs.compilation.listener
        knobs.compilation.listener = clock
    return clock
