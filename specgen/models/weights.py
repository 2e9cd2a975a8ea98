"""From a folder of safetensors files to filled weights, by the checkpoint's own tensor names.

A plan names every tensor that the model needs, its shape, and the views of our weights that it fills; products that we
fuse are filled slice by slice. What is missing, unexpected or of another shape is an error that names file and tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from specgen.errors import ModelError
from specgen.models.attention import MLAAttention
from specgen.models.config import DeepseekV3Config
from specgen.models.deepseek_v3 import DecoderLayer, DeepseekV3ForCausalLM, MoE
from specgen.models.layers import MLP
from specgen.models.mtp import DeepseekMTP

# Stored by old exporters, computed here.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


class Target(NamedTuple):
    """Where a checkpoint tensor of `shape` goes: pairs of (our weight or a view of it, part of the tensor)."""

    shape: tuple[int, ...]
    parts: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]]


Plan = dict[str, Target]


def _whole(weight: torch.Tensor) -> Target:
    return Target(tuple(weight.shape), [(weight, None)])


def _plan_mlp(plan: Plan, prefix: str, mlp: MLP) -> None:
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    plan[prefix + "gate_proj.weight"] = _whole(gate)
    plan[prefix + "up_proj.weight"] = _whole(up)
    plan[prefix + "down_proj.weight"] = _whole(mlp.down_proj.weight)


def _plan_moe(plan: Plan, prefix: str, moe: MoE) -> None:
    plan[prefix + "gate.weight"] = _whole(moe.gate)
    plan[prefix + "gate.e_score_correction_bias"] = _whole(moe.correction_bias)
    for i in range(moe.w13.shape[0]):
        gate, up = moe.w13[i].chunk(2)
        plan[f"{prefix}experts.{i}.gate_proj.weight"] = _whole(gate)
        plan[f"{prefix}experts.{i}.up_proj.weight"] = _whole(up)
        plan[f"{prefix}experts.{i}.down_proj.weight"] = _whole(moe.w2[i])
    if moe.shared_experts is not None:
        _plan_mlp(plan, prefix + "shared_experts.", moe.shared_experts)


def _plan_attention(plan: Plan, prefix: str, attn: MLAAttention) -> None:
    a_weight = attn.qkv_a_proj.weight
    if attn.has_q_lora:
        plan[prefix + "q_a_proj.weight"] = _whole(a_weight[: attn.q_size])
        plan[prefix + "q_a_layernorm.weight"] = _whole(attn.q_a_layernorm.weight)
        plan[prefix + "q_b_proj.weight"] = _whole(attn.q_b_proj.weight)
    else:
        plan[prefix + "q_proj.weight"] = _whole(a_weight[: attn.q_size])
    plan[prefix + "kv_a_proj_with_mqa.weight"] = _whole(a_weight[attn.q_size :])
    plan[prefix + "kv_a_layernorm.weight"] = _whole(attn.kv_a_layernorm.weight)
    heads, nope, value, rank = attn.num_heads, attn.nope, attn.value, attn.rank
    plan[prefix + "kv_b_proj.weight"] = Target(
        (heads * (nope + value), rank),
        [
            (attn.w_uk.transpose(1, 2), lambda t: t.view(heads, nope + value, rank)[:, :nope]),
            (attn.w_uv, lambda t: t.view(heads, nope + value, rank)[:, nope:]),
        ],
    )
    plan[prefix + "o_proj.weight"] = _whole(attn.o_proj.weight)


def _plan_decoder_layer(plan: Plan, prefix: str, layer: DecoderLayer) -> None:
    plan[prefix + "input_layernorm.weight"] = _whole(layer.input_layernorm.weight)
    plan[prefix + "post_attention_layernorm.weight"] = _whole(layer.post_attention_layernorm.weight)
    _plan_attention(plan, prefix + "self_attn.", layer.self_attn)
    if isinstance(layer.mlp, MoE):
        _plan_moe(plan, prefix + "mlp.", layer.mlp)
    else:
        _plan_mlp(plan, prefix + "mlp.", layer.mlp)


def plan_target(model: DeepseekV3ForCausalLM) -> Plan:
    """Every tensor of the target, by its name in a DeepSeek-V3 checkpoint."""
    plan: Plan = {
        "model.embed_tokens.weight": _whole(model.embed_tokens.weight),
        "model.norm.weight": _whole(model.norm.weight),
        "lm_head.weight": _whole(model.lm_head.weight),
    }
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        _plan_decoder_layer(plan, f"model.layers.{i}.", layer)
    return plan


def plan_mtp(mtp: DeepseekMTP, config: DeepseekV3Config, names: frozenset[str]) -> Plan:
    """Every tensor of the draft layers: they stand behind the target's layers; own embedding and heads where stored."""
    plan: Plan = {}
    for i, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{config.num_hidden_layers + i}."
        _plan_decoder_layer(plan, prefix, layer.mtp_block)  # type: ignore[arg-type]
        for name in ("enorm", "hnorm", "eh_proj"):
            plan[f"{prefix}{name}.weight"] = _whole(getattr(layer, name).weight)
        plan[prefix + "shared_head.norm.weight"] = _whole(layer.shared_head_norm.weight)  # type: ignore[arg-type, union-attr]
        if prefix + "shared_head.head.weight" in names:
            plan[prefix + "shared_head.head.weight"] = _whole(mtp.heads[i].weight)  # type: ignore[arg-type]
    embedding = f"model.layers.{config.num_hidden_layers}.embed_tokens.weight"
    if embedding in names:
        plan[embedding] = _whole(mtp.embed_tokens.weight)
    return plan


class Checkpoint:
    """The safetensors files of a folder and where each tensor is. Opens files by memory map; never unpickles."""

    def __init__(self, folder: Path) -> None:
        """Lists the tensors.

        Raises:
            ModelError: no safetensors file, a damaged one, or an index that names a missing file.
        """
        self.folder = folder
        self.files: dict[str, Path] = {}
        for path in self._paths():
            with self._open(path) as file:
                self.files.update(dict.fromkeys(file.keys(), path))

    @property
    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return frozenset(self.files)

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            paths = sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise ModelError("no *.safetensors file", where=str(self.folder), hint="only safetensors are loaded")
            return paths
        try:
            stored = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"not a safetensors index: {error}", where=str(index)) from error
        paths = [self.folder / name for name in stored]
        for path in paths:
            if not path.is_file() or path.parent != self.folder:
                raise ModelError(f"names the file {path.name!r}, which is not there", where=str(index))
        return paths

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"damaged or truncated: {error}", where=str(path), hint="fetch the file again") from error

    def read(self, names: set[str]) -> Iterator[tuple[str, Path, torch.Tensor]]:
        """Yields (name, file, tensor) for the given names, file by file."""
        for path in sorted(set(self.files.values())):
            wanted = sorted(name for name in names if self.files[name] == path)
            if wanted:
                with self._open(path) as file:
                    for name in wanted:
                        yield name, path, file.get_tensor(name)


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, plan: Plan, unused_prefixes: tuple[str, ...]) -> int:
    """Fills every weight of the plan; returns the bytes read. Tensors named by `unused_prefixes` may be left over.

    Raises:
        ModelError: a tensor is missing, is not in the plan, or has another shape or an integer dtype.
    """
    missing = sorted(plan.keys() - checkpoint.names)
    if missing:
        raise ModelError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}", where=str(checkpoint.folder)
        )
    left = [n for n in checkpoint.names - plan.keys() if not n.startswith(unused_prefixes) and not _COMPUTED.search(n)]
    if left:
        name = min(left)
        raise ModelError(f"unexpected tensor {name!r} ({len(left)} in all)", where=str(checkpoint.files[name]))
    num_bytes = 0
    for name, path, tensor in checkpoint.read(set(plan)):
        target = plan[name]
        if tuple(tensor.shape) != target.shape:
            raise ModelError(
                f"{name!r} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}", where=str(path)
            )
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ModelError(f"{name!r} has dtype {tensor.dtype}, which is not supported", where=str(path))
        for weight, part in target.parts:
            weight.copy_(tensor if part is None else part(tensor))
        num_bytes += tensor.nbytes
    return num_bytes
