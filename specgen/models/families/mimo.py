"""MiMo-7B: Qwen2's body and draft layers under `model.mtp_layers.i`; also the layout of heads in a folder of their own.

The head reads the target's hidden states before the final norm, and takes them first in the projection; the embedding
at position 0 is masked with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgen.models.dense import DenseForCausalLM
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.draft_head import DraftHead, HeadConvention
from specgen.models.families import DraftLayout, Family
from specgen.models.families.llama import unused
from specgen.models.plans import plan_draft_head, plan_target
from specgen.models.weights import Plan

CONVENTION = HeadConvention(hidden_first=True)
_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def parse_config(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a parsed `config.json`; see `parse_dense`."""
    fields, _ = parse_dense(raw, where)
    return DenseConfig(**fields, qkv_bias=True)


def draft_prefix(config: DenseConfig, layer: int) -> str:
    """What the names of draft layer `layer`'s tensors begin with."""
    return f"model.mtp_layers.{layer}."


def build_draft(
    target: DenseForCausalLM, num_layers: int, names: frozenset[str], dtype: torch.dtype, device: torch.device
) -> DraftHead:
    """The draft layers, of the target's shape, with its embedding and head."""
    positions = target.cos_sin.shape[0]
    return DraftHead(target, target.config, CONVENTION, num_layers, positions, False, frozenset(), dtype, device)


def plan_draft(head: DraftHead, config: DenseConfig, names: frozenset[str]) -> Plan:
    """Where the draft layers' tensors go."""
    return plan_draft_head(head, _NAMES, lambda i: draft_prefix(config, i), names)


FAMILY = Family(parse_config, DenseForCausalLM, plan_target, DraftLayout(draft_prefix, build_draft, plan_draft), unused)
