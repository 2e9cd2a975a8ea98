"""FP8 checkpoints (e4m3 with scales in float32), turned into the model's dtype as they are loaded.

Which tensor is quantised is decided by what is stored, one by one: an FP8 tensor needs its scale beside it, any other
is taken as it is, so that a quantised model with a plain draft layer, or the other way round, is no special case.

    X.weight_scale_inv   one scale a block of 128 x 128, as DeepSeek publishes it
    X.weight_scale       one scale a tensor, or one a row (compressed-tensors)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from specgen import checks
from specgen.errors import ModelError
from specgen.models.checkpoint import Checkpoint, StoredTensor, TensorFile

if TYPE_CHECKING:
    from specgen.models.weights import Plan

BLOCK = 128
_SUFFIXES = ("_scale_inv", "_scale")
_HINT = "supported: FP8 as DeepSeek publishes it (e4m3, blocks of 128 x 128) and compressed-tensors FP8"


def check_quantization(declared: object, where: str) -> None:
    """Raises ModelError if a config.json's `quantization_config` says anything but FP8 weights."""
    if declared is None:
        return
    if not isinstance(declared, Mapping):
        raise ModelError(f"quantised weights ({checks.shown(declared)}) are not supported", where=where, hint=_HINT)
    method = declared.get("quant_method")
    if method == "fp8":
        kind = declared.get("fmt", "e4m3")
        block = declared.get("weight_block_size")
        if kind == "e4m3" and block in (None, [BLOCK, BLOCK]):
            return
        method = f"fp8, {kind}, blocks of {checks.shown(block)}"
    elif method == "compressed-tensors":
        groups = declared.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, Mapping) else []
        weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups]
        if weights and all(map(_is_float8, weights)):
            return
        method = f"compressed-tensors, {checks.shown(declared.get('format'))}"
    raise ModelError(f"quantised weights ({method}) are not supported", where=where, hint=_HINT)


def _is_float8(weights: Any) -> bool:
    known = isinstance(weights, Mapping) and weights.get("strategy") in ("channel", "tensor", "block")
    return known and weights.get("num_bits") == 8 and weights.get("type") == "float"


def scale_names(stored: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, str]:
    """The name of each wanted FP8 tensor's scale.

    Raises:
        ModelError: an FP8 tensor has none, or one of a shape that fits no known layout.
    """
    found = {}
    for name in wanted:
        tensor = stored[name]
        if tensor.dtype != torch.float8_e4m3fn:
            continue
        scale = next((stored[name + s] for s in _SUFFIXES if name + s in stored), None)
        if scale is None:
            raise ModelError(
                f"{name!r} is FP8, and neither {name + _SUFFIXES[0]!r} nor {name + _SUFFIXES[1]!r} is there",
                where=str(tensor.path),
            )
        if len(tensor.shape) != 2 or scale.shape not in _scale_shapes(tensor.shape):
            raise ModelError(
                f"{scale.name!r} has shape {list(scale.shape)}, which does not fit {list(tensor.shape)}",
                where=str(scale.path),
                hint=_HINT,
            )
        found[name] = scale.name
    return found


def scaled_name(name: str) -> str:
    """The name of the tensor that a scale of this name would belong to; "" if it is no scale's."""
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), "")


def _scale_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    return (), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // BLOCK), -(-columns // BLOCK))


@torch.no_grad()
def apply_scales(checkpoint: Checkpoint, plan: Plan, scales: Mapping[str, str]) -> int:
    """Multiplies the weights that were filled with FP8 values by their scales; returns the scales' bytes.

    The product is rounded once, to the weight's dtype.

    Raises:
        ModelError: a scale is NaN or infinite.
    """
    num_bytes = 0
    for name, scale_name in scales.items():
        stored, target = checkpoint.tensors[scale_name], plan[name]
        with TensorFile(stored.path) as file:
            buffer = torch.empty(stored.num_bytes, dtype=torch.uint8)
            scale = file.read_rows(stored, 0, stored.shape[0] if stored.shape else 1, buffer)
        if not scale.float().isfinite().all():
            raise not_finite(stored)
        full = expand_scale(scale.to(target.parts[0][0].device).float(), target.shape)
        for weight, part in target.parts:
            weight.copy_(weight.float() * (full if part is None else part(full)))
        num_bytes += stored.num_bytes
    return num_bytes


def not_finite(stored: StoredTensor) -> ModelError:
    """The error that a stored tensor holds what no trained model has: every token would follow from it."""
    message = f"{stored.name!r} holds NaN or infinite values"
    return ModelError(message, where=str(stored.path), hint="fetch the file again")


def expand_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One scale for each element of a weight `[out, in]`, contiguous."""
    rows, columns = shape
    if scale.dim() == 2 and scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and scale.shape != (rows, 1):
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    elif scale.numel() == rows:
        scale = scale.view(rows, 1)
    return scale.expand(rows, columns).contiguous()
