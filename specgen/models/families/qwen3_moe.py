"""Qwen3-MoE: Qwen3's attention, and experts by the softmax of their scores in all layers but the ones named dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen import checks
from specgen.errors import ModelError
from specgen.models.config import COUNT, SIZE, check_routing
from specgen.models.dense import DenseForCausalLM
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.families import Family
from specgen.models.families.llama import unused
from specgen.models.plans import plan_target

_CHECKS: dict[str, checks.Check] = {
    "num_experts": COUNT,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": checks.boolean(),
    "decoder_sparse_step": SIZE,
}
_DEFAULTS = {"decoder_sparse_step": 1, "norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 8}


def parse_config(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a parsed `config.json`; see `parse_dense`."""
    fields, values = parse_dense(raw, where, extra_checks=_CHECKS, extra_defaults=_DEFAULTS)
    dense_layers = raw.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise ModelError(f"mlp_only_layers must be a list, not {checks.shown(dense_layers)}", where=where)
    step, num_experts = values["decoder_sparse_step"], values["num_experts"]
    layers = range(values["num_hidden_layers"] if num_experts else 0)
    config = DenseConfig(
        **fields,
        qkv_bias=values["attention_bias"],
        o_bias=values["attention_bias"],
        qk_norm=True,
        moe_layers=frozenset(i for i in layers if i not in dense_layers and (i + 1) % step == 0),
        n_routed_experts=num_experts,
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
    )
    if num_experts:
        check_routing(config, where)
    return config


FAMILY = Family(parse_config, DenseForCausalLM, plan_target, draft=None, unused=unused)
