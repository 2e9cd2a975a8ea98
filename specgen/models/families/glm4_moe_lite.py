"""GLM-4.7-Flash: DeepSeek-V3's layout, latent attention and draft layer included, one dense layer in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen.models.config import SIGMOID_ROUTING, DeepseekV3Config, make_deepseek, read_deepseek_values, refuse
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.models.families import Family
from specgen.models.families.deepseek_v3 import LAYERED_DRAFT
from specgen.models.plans import plan_target


def parse_config(raw: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The shape in a parsed `config.json`."""
    defaults: dict[str, Any] = {"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5}
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if "dense" in kinds[first:] or set(kinds) - {"dense", "sparse"}:
            refuse("mlp_layer_types", kinds, "dense layers first, then sparse ones", where)
        defaults["first_k_dense_replace"] = first
    values = read_deepseek_values(raw, defaults, where, SIGMOID_ROUTING)
    return make_deepseek(values | {"model_type": "glm4_moe_lite"}, where)


FAMILY = Family(parse_config, DeepseekV3ForCausalLM, plan_target, LAYERED_DRAFT)
