"""Kernels compiled side by side, before the steps that launch them.

Triton compiles a kernel when it is first launched, so that on a new machine the first steps of every size wait for a
hundred kernels, one after the other. Here steps are gone through in which a launch only names the kernel to compile.
What they compute means nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from specgen.kernels._triton import HAS_TRITON
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


class _Threads(ThreadPoolExecutor):
    """As many as there are cores; says how many of the tasks so far are done."""

    def __init__(self, on_progress: Callable[[int, int], None] | None) -> None:
        super().__init__(min(_MOST_THREADS, os.cpu_count() or 1))
        self._on_progress = on_progress
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As an executor does."""
        future = super().submit(fn, *args, **kwargs)
        self._futures.append(future)
        self._tell(future)
        future.add_done_callback(self._tell)
        return future

    def _tell(self, _: Future[Any]) -> None:
        if self._on_progress is not None:
            self._on_progress(sum(future.done() for future in self._futures), len(self._futures))


def compile_ahead(
    target: TargetModel,
    steps: Iterable[Callable[[], object]],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """The kernels that `steps` of `target` launch are compiled, as many at once as there are cores.

    Of the target's layers, steps go through one of each kind. No kernel is launched: their results are zeros. One that
    can't be compiled says so when it is launched. `on_progress(compiled, known so far)` is told from any thread. Does
    nothing without Triton, or with one that can't compile in threads (before 3.5).
    """
    if not HAS_TRITON:
        return
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return
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
        if future is not None and future.done():  # from now on it is found at once
            kernel.result(ignore_errors=True)
        return kernel

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def _one_of_each_kind(target: TargetModel) -> Iterator[None]:
    """The target has one layer of each kind: the first with experts, and the first without."""
    layers = target.layers
    kinds = {type(layer.mlp): layer for layer in reversed(layers)}
    target.layers = nn.ModuleList(kinds.values())
    try:
        yield
    finally:
        target.layers = layers
