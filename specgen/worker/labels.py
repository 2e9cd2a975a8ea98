"""Says in a trace which part of the model each kernel belongs to.

A graph's replay shows kernels by name only. The same steps, run one operation at a time in ranges named after the
model's modules, launch the same kernels in the same order, and there the host's timeline tells where each comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from specgen.models.cheap_drafts import Float8Linear
from specgen.models.kept_float8 import BlockFloat8Linear
from specgen.models.layers import Linear
from specgen.worker.model_runner import ModelRunner

# What the names of ranges begin with: "part:target", "module:o_proj:Linear:8388608", which has the weight's bytes.
PART, MODULE = "part:", "module:"


class StepLabels:
    """Runs a runner's steps without graphs and inside named ranges, until `remove`."""

    def __init__(self, runner: ModelRunner, models: Iterable[object]) -> None:
        """`models`: the target and the draft layers, as far as they are modules."""
        self._runner = runner
        self._graphs, runner.graphs = runner.graphs, None
        self._forward_graphs, runner.forward_graphs = runner.forward_graphs, None
        self._handles: list[Any] = []
        self._open: list[Any] = []
        self._part: Any = None
        seen: set[int] = set()
        for model in models:
            for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
                if id(module) not in seen:  # the draft layers may use the target's head
                    seen.add(id(module))
                    self._label(name.rpartition(".")[2], module)
        runner.timer.on_part = self._enter_part

    def remove(self) -> None:
        """Leaves everything as it was."""
        for handle in self._handles:
            handle.remove()
        self._runner.timer.on_part = None
        self._runner.graphs = self._graphs
        self._runner.forward_graphs = self._forward_graphs

    def _label(self, name: str, module: nn.Module) -> None:
        range_name = f"{MODULE}{name}:{type(module).__name__}:{_weight_bytes(module)}"

        def enter(*_: object) -> None:
            self._open.append(_opened(range_name))

        def leave(*_: object) -> None:
            if self._open:
                self._open.pop().__exit__(None, None, None)

        self._handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _enter_part(self, part: str) -> None:
        if self._part is not None:
            self._part.__exit__(None, None, None)
        self._part = _opened(PART + part) if part else None


def _weight_bytes(module: nn.Module) -> int:
    """Of a module that is one product with one weight, scales included; else 0."""
    if isinstance(module, Float8Linear):
        return module.rounded.values.nbytes + module.rounded.scale.nbytes
    if isinstance(module, Linear | BlockFloat8Linear):
        return sum(weight.nbytes for weight in module.parameters(recurse=False))
    return 0


def _opened(name: str) -> Any:
    entered = torch.profiler.record_function(name)
    entered.__enter__()
    return entered
