"""From a folder of safetensors files to filled weights, by the checkpoint's own tensor names.

A plan names every tensor that the model needs, its shape, and the views of our weights that it fills; products that we
fuse are filled slice by slice. What is missing, unexpected or of another shape is an error that names file and tensor.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from specgen.errors import ModelError
from specgen.models.checkpoint import Checkpoint, StoredTensor, TensorFile
from specgen.models.fp8 import BLOCK, apply_scales, not_finite, scale_names, scaled_name
from specgen.models.staging import Staging
from specgen.stats import counted

# Stored by old exporters and computed here, or of activations, which are not quantised.
_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|input_scale)$")
# Reading on a GPU machine: threads, and the bytes that one of them takes at a time.
_NUM_THREADS = 8
_UNIT_BYTES = 256 << 20

OnProgress = Callable[[int, int], None]


class Target(NamedTuple):
    """Where a checkpoint tensor of `shape` goes: pairs of (our weight or a view of it, part of the tensor)."""

    shape: tuple[int, ...]
    parts: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]]


Plan = dict[str, Target]


def load_weights(
    checkpoint: Checkpoint,
    plan: Plan,
    unused_prefixes: tuple[str, ...],
    on_progress: OnProgress | None = None,
    num_threads: int | None = None,
) -> int:
    """Fills every weight of the plan; returns the bytes read. Tensors named by `unused_prefixes` may be left over.

    `on_progress(bytes so far, bytes in all)` is called from the threads that read. `num_threads` None is one on the
    CPU, whose copies go at the memory's speed, and several on a GPU, each with a page-locked buffer and a stream.

    Raises:
        ModelError: a tensor is missing, is not in the plan, has another shape or an integer dtype, or is not finite.
    """
    check_tensors(checkpoint, plan, unused_prefixes)
    scales = {
        name: scale
        for name, scale in scale_names(checkpoint.tensors, plan).items()
        if plan[name].parts[0][0].dtype != torch.float8_e4m3fn  # kept in FP8: the scale is a tensor of the plan
    }
    units = checkpoint.units(plan, _UNIT_BYTES)
    progress = _Progress(sum(stored.num_bytes for unit in units for stored in unit), on_progress)
    device = next(iter(plan.values())).parts[0][0].device
    num_threads = num_threads or (1 if device.type == "cpu" else _NUM_THREADS)
    if num_threads == 1:
        for unit in units:
            _load_unit(unit, plan, progress)
    else:
        # Largest first, so that no thread is left with a large one at the end.
        units.sort(key=lambda unit: -sum(stored.num_bytes for stored in unit))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
            for done in [pool.submit(_load_unit, unit, plan, progress) for unit in units]:
                done.result()
    scale_bytes = apply_scales(checkpoint, plan, scales)
    _require_finite(checkpoint, plan)
    return progress.total + scale_bytes


def check_tensors(checkpoint: Checkpoint, plan: Plan, unused_prefixes: tuple[str, ...]) -> None:
    """Returns if the checkpoint holds what the plan needs, and nothing else but tensors named by `unused_prefixes`.

    Raises:
        ModelError: the first of `tensor_problems`.
    """
    for problem in tensor_problems(checkpoint, plan, unused_prefixes):
        raise problem


def tensor_problems(checkpoint: Checkpoint, plan: Plan, unused_prefixes: tuple[str, ...]) -> list[ModelError]:
    """What the headers tell is wrong, the first of each kind: a tensor is missing, has a dtype that is not loaded, is
    FP8 without a scale that fits, is not in the plan, or has another shape.
    """
    problems: list[ModelError] = []
    if missing := sorted(plan.keys() - checkpoint.names):
        message = f"{counted(len(missing), 'tensor')} missing, the first is {missing[0]!r}"
        problems.append(checkpoint.missing(missing[0], message, "are all of the model's files there?"))
    wanted = [checkpoint.tensors[name] for name in sorted(plan.keys() & checkpoint.names)]
    try:
        for stored in wanted:
            _ = stored.dtype  # refuses what is not supported
        scales = scale_names(checkpoint.tensors, [stored.name for stored in wanted])
    except ModelError as error:
        problems.append(error)
    else:
        problems += _unexpected(checkpoint, checkpoint.names - plan.keys() - set(scales.values()), unused_prefixes)
    for stored in wanted:
        if stored.shape != plan[stored.name].shape:
            message = f"{stored.name!r} has shape {list(stored.shape)}; config.json asks for "
            problems.append(ModelError(message + str(list(plan[stored.name].shape)), where=str(stored.path)))
            break
    return problems


def _unexpected(checkpoint: Checkpoint, names: Iterable[str], unused_prefixes: tuple[str, ...]) -> list[ModelError]:
    """An error that names the first of the tensors that nothing reads, if there are any."""
    left = [name for name in names if not name.startswith(unused_prefixes) and not _COMPUTED.search(name)]
    if not left:
        return []
    name = min(left)
    hint = "the model has a part that its model_type has not, or the file belongs to another model"
    if (weight := checkpoint.tensors.get(scaled_name(name))) is not None:
        hint = f"it is the scale of a tensor in FP8, and {weight.name!r} is stored in {weight.dtype_name}"
    where = str(checkpoint.tensors[name].path)
    return [ModelError(f"unexpected tensor {name!r} ({len(left)} in all)", where=where, hint=hint)]


def _require_finite(checkpoint: Checkpoint, plan: Plan) -> None:
    """Raises ModelError, naming the tensor, if a weight holds NaN or infinity."""
    weights = [(name, weight) for name, target in plan.items() for weight, _ in target.parts]
    bounds = torch.stack([torch.stack(torch.aminmax(_comparable(weight))).float() for _, weight in weights])
    for (name, _), is_finite in zip(weights, bounds.isfinite().all(1).tolist(), strict=True):
        if not is_finite:
            raise not_finite(checkpoint.tensors[name])


def _comparable(weight: torch.Tensor) -> torch.Tensor:
    """FP8 in a dtype that has an order."""
    return weight.bfloat16() if weight.dtype == torch.float8_e4m3fn else weight


class _Progress:
    """Counts bytes over all threads."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.total = total
        self._done = 0
        self._lock = threading.Lock()
        self._on_progress = on_progress

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self.total)


@torch.no_grad()
def _load_unit(unit: list[StoredTensor], plan: Plan, progress: _Progress) -> None:
    device = plan[unit[0].name].parts[0][0].device
    with TensorFile(unit[0].path) as file:
        if device.type == "cuda":
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                _load_tensors(unit, file, plan, Staging(device), progress)
        else:
            _load_tensors(unit, file, plan, Staging(device), progress)


def _load_tensors(
    unit: list[StoredTensor], file: TensorFile, plan: Plan, staging: Staging, progress: _Progress
) -> None:
    for stored in unit:
        staging.fill(plan[stored.name], stored, file)
        progress.add(stored.num_bytes)
    staging.wait()


@torch.no_grad()
def fill_random(plan: Plan, seed: int, dtype: torch.dtype, on_progress: OnProgress | None = None) -> int:
    """Fills every weight of the plan at the scale of a trained model; returns the bytes filled.

    Matrices are normal with variance 1 / inputs, so that activations keep their size from layer to layer and tokens
    spread over the experts; norms are 1, the router's bias is 0. All values are such as `dtype` holds.
    """
    generators: dict[torch.device, torch.Generator] = {}
    progress = _Progress(sum(w.nbytes for t in plan.values() for w, _ in t.parts), on_progress)
    for name, target in plan.items():
        for weight, _ in target.parts:
            device = weight.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            if len(target.shape) == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith("_scale_inv"):
                weight.fill_((target.shape[-1] * BLOCK) ** -0.5)  # FP8 values are about 1
            elif weight.dtype == dtype:  # in its place: memory in between would stay taken, in pieces
                weight.normal_(0.0, target.shape[-1] ** -0.5, generator=generators[device])
            else:
                values = torch.empty(weight.shape, dtype=dtype, device=device)
                spread = 1.0 if weight.dtype == torch.float8_e4m3fn else target.shape[-1] ** -0.5
                weight.copy_(values.normal_(0.0, spread, generator=generators[device]))
            progress.add(weight.nbytes)
    return progress.total
