"""Llama and its many relatives: grouped-query attention, one or two biases, tied or own head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen.models.dense import DenseForCausalLM
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.families import Family
from specgen.models.plans import plan_target


def parse_config(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a parsed `config.json`; see `parse_dense`."""
    fields, values = parse_dense(raw, where)
    return DenseConfig(**fields, qkv_bias=values["attention_bias"], o_bias=values["attention_bias"])


def unused(config: DenseConfig) -> tuple[str, ...]:
    """A tied head may be stored a second time."""
    return ("lm_head.",) if config.tie_word_embeddings else ()


FAMILY = Family(parse_config, DenseForCausalLM, plan_target, draft=None, unused=unused)
