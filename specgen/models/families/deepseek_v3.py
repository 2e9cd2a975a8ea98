"""DeepSeek-V3, R1, V3.1, Moonlight, Kimi-K2: MLA, sigmoid routing in groups, draft layers behind the last layer."""

from __future__ import annotations

import torch

from specgen.models.config import ModelConfig, parse_deepseek
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.models.families import DraftLayout, Family
from specgen.models.mtp import DeepseekMTP
from specgen.models.plans import plan_mtp, plan_target


def draft_prefix(config: ModelConfig, layer: int) -> str:
    """What the names of draft layer `layer`'s tensors begin with."""
    return f"model.layers.{config.num_hidden_layers + layer}."


def build_draft(
    target: DeepseekV3ForCausalLM,
    num_layers: int,
    names: frozenset[str],
    dtype: torch.dtype,
    device: torch.device,
) -> DeepseekMTP:
    """The draft layers, with heads and an embedding of their own where the checkpoint stores them."""
    return DeepseekMTP(target, num_layers, *own_parts(target.config, num_layers, names), dtype, device)


def own_parts(config: ModelConfig, num_layers: int, names: frozenset[str]) -> tuple[bool, frozenset[int]]:
    """Whether the checkpoint stores an embedding of the draft layers' own, and which of them have a head."""
    prefixes = [draft_prefix(config, i) for i in range(num_layers)]
    own_heads = frozenset(i for i, p in enumerate(prefixes) if p + "shared_head.head.weight" in names)
    return prefixes[0] + "embed_tokens.weight" in names, own_heads


def copies(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The embedding is stored with each draft layer, and read with the first."""
    return () if layer == 0 else (draft_prefix(config, layer) + "embed_tokens.",)


LAYERED_DRAFT = DraftLayout(draft_prefix, build_draft, plan_mtp, copies)
FAMILY = Family(parse_deepseek, DeepseekV3ForCausalLM, plan_target, LAYERED_DRAFT)
