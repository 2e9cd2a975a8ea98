"""Qwen2 and Qwen2.5: like Llama, with a bias on queries, keys and values alone."""

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
    fields, _ = parse_dense(raw, where)
    return DenseConfig(**fields, qkv_bias=True)


FAMILY = Family(parse_config, DenseForCausalLM, plan_target, draft=None, unused=unused)
