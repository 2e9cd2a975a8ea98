"""DeepSeek-V2 and V2-Lite: V3's layout with softmax routing, groups by their best expert, and no draft layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen.models.config import DeepseekV3Config, make_deepseek, read_deepseek_values, refuse
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.models.families import Family
from specgen.models.plans import plan_target


def parse_config(raw: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The shape in a parsed `config.json`. As in transformers, `norm_topk_prob` must be off."""
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        refuse("topk_method", method, "'greedy', 'group_limited_greedy'", where)
    if raw.get("scoring_func", "softmax") != "softmax":
        refuse("scoring_func", raw["scoring_func"], "'softmax'", where)
    if raw.get("norm_topk_prob"):
        refuse("norm_topk_prob", True, "false", where)
    values = read_deepseek_values(raw, {"norm_topk_prob": False, "n_shared_experts": 2}, where)
    if method == "greedy":
        values |= {"n_group": 1, "topk_group": 1}
    own = {"num_nextn_predict_layers": 0, "rope_interleave": True, "scoring_func": "softmax"}
    return make_deepseek(values | own | {"model_type": "deepseek_v2"}, where)


FAMILY = Family(parse_config, DeepseekV3ForCausalLM, plan_target, draft=None)
