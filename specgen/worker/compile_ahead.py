"""Kernels compiled side by side, before the steps that launch them.

Triton compiles a kernel when it is first launched, so that on a new machine the first steps of every size wait for a
hundred kernels, one after the other. Here steps are gone through in which a launch only names the kernel to compile.
What they compute means nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from specgen.kernels._triton import TRITON_VERSION
from specgen.models.families import TargetModel

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
_UNFILLED = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty})


class _Zeros(TorchFunctionMode):
    """Memory that is to be filled later holds zeros: what is read from it as an index lies in every tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNFILLED else result


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Threads(ThreadPoolExecutor):
    """As many as there are cores, within reason; says how many of the tasks so far are done."""

    def __init__(self, on_progress: Callable[[int, int], None] | None) -> None:
        super().__init__(min(_MOST_THREADS, _num_cores()))
        self._on_progress = on_progress
        self._lock = threading.RLock()  # a task that is done already is told of where it is added
        self._num_tasks = self._num_done = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As an executor does."""
        with self._lock:
            future = super().submit(fn, *args, **kwargs)
            self._num_tasks += 1
            self._tell()
            future.add_done_callback(self._count)
        return future

    def _count(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_done += 1
            self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_tasks)


def compile_ahead(
    target: TargetModel,
    steps: Iterable[Callable[[], object]],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """The kernels that `steps` of `target` launch are compiled, as many at once as there are cores, up to 16.

    Of the target's layers, steps go through one of each kind. No kernel is launched: their results are zeros. One that
    can't be compiled says so when it is launched. `on_progress(compiled, known so far)` is told from any thread. Does
    nothing without Triton, or with one that can't compile so (before 3.6).
    """
    if TRITON_VERSION < (3, 6):
        return
    from triton import AsyncCompileMode

    started = time.perf_counter()
    threads = _Threads(on_progress)
    with threads, AsyncCompileMode(threads, ignore_errors=True), _one_of_each_kind(target), _only_compiled(), _Zeros():
        for step in steps:
            step()
        seconds = time.perf_counter() - started
    logger.debug("went through steps in %.1f s, compiled in %.1f s", seconds, time.perf_counter() - started)


@contextmanager
def _only_compiled() -> Iterator[None]:
    """Launches of all kernels compile them and do nothing else."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        future = getattr(kernel, "future", None)
        # From now on it is found at once. One that failed is for the end, which forgets it.
        if future is not None and future.done() and future.exception() is None:
            kernel.result()
        return kernel

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def _one_of_each_kind(target: TargetModel) -> Iterator[None]:
    """The target has one layer of each kind, which is its feed-forward's: all layers have one attention."""
    layers = target.layers
    kinds = {type(layer.mlp): layer for layer in reversed(layers)}
    target.layers = nn.ModuleList(kinds.values())
    try:
        yield
    finally:
        target.layers = layers
