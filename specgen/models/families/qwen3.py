"""Qwen3, dense: query and key heads are normed before they turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen.models.dense import DenseForCausalLM
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.families import Family
from specgen.models.families.llama import unused
from specgen.models.plans import plan_target


def parse_config(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a parsed `config.json`; see `parse_dense`."""
    fields, values = parse_dense(raw, where, extra_defaults={"head_dim": 128})
    return DenseConfig(**fields, qkv_bias=values["attention_bias"], o_bias=values["attention_bias"], qk_norm=True)


FAMILY = Family(parse_config, DenseForCausalLM, plan_target, draft=None, unused=unused)
