"""A model folder turned into a target and, where speculation is on, its draft layers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from specgen.errors import ModelError
from specgen.models.config import DeepseekV3Config
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM, MoE
from specgen.models.mtp import DeepseekMTP
from specgen.models.weights import Checkpoint, load_weights, plan_mtp, plan_target


class LoadedModel(NamedTuple):
    """Target and drafter; `num_bytes` were read from the files."""

    target: DeepseekV3ForCausalLM
    mtp: DeepseekMTP | None
    num_bytes: int


def load_model(
    folder: Path,
    config: DeepseekV3Config,
    num_speculative_tokens: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    """Builds the model on `device` and fills it. Draft layers beyond K are never run, and not loaded.

    Raises:
        ModelError: the checkpoint lacks the draft layer that speculation needs, or does not fit its configuration.
    """
    checkpoint = Checkpoint(folder)
    target = DeepseekV3ForCausalLM(config, max_positions, dtype, device)
    plan = plan_target(target)
    mtp = None
    num_layers = min(config.num_nextn_predict_layers, num_speculative_tokens)
    if num_speculative_tokens:
        _require_draft_layers(config, checkpoint, num_layers)
        prefixes = [f"model.layers.{config.num_hidden_layers + i}." for i in range(num_layers)]
        own_heads = frozenset(i for i, p in enumerate(prefixes) if p + "shared_head.head.weight" in checkpoint.names)
        own_embedding = prefixes[0] + "embed_tokens.weight" in checkpoint.names
        mtp = DeepseekMTP(target, num_layers, own_embedding, own_heads, dtype, device)
        plan |= plan_mtp(mtp, config, checkpoint.names)
    num_bytes = load_weights(checkpoint, plan, _unused_prefixes(config, num_layers if mtp is not None else 0))
    for module in (target, mtp):
        for part in module.modules() if module is not None else ():
            if isinstance(part, MoE):
                part.narrow_gate(dtype)
    return LoadedModel(target.eval(), mtp.eval() if mtp is not None else None, num_bytes)


def _unused_prefixes(config: DeepseekV3Config, num_layers: int) -> tuple[str, ...]:
    """Draft layers that are not run, and the copies of the embedding behind the first one that is."""
    first = config.num_hidden_layers
    unused = [f"model.layers.{first + i}." for i in range(num_layers, config.num_nextn_predict_layers)]
    copies = [f"model.layers.{first + i}.embed_tokens." for i in range(1, num_layers)]
    return (*unused, *copies)


def _require_draft_layers(config: DeepseekV3Config, checkpoint: Checkpoint, num_layers: int) -> None:
    hint = "set speculation.num_tokens to 0 for plain decoding"
    if num_layers == 0:
        raise ModelError(
            "the model has no draft layer (num_nextn_predict_layers is 0)", where=str(checkpoint.folder), hint=hint
        )
    for i in range(num_layers):
        prefix = f"model.layers.{config.num_hidden_layers + i}."
        if not any(name.startswith(prefix) for name in checkpoint.names):
            raise ModelError(
                f"config.json promises a draft layer, and no tensor begins with {prefix!r}",
                where=str(checkpoint.folder),
                hint=hint + "; a converter may have dropped it",
            )
