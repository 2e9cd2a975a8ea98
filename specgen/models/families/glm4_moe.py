"""GLM-4.5 and 4.6: half-turned heads with norms, sigmoid routing, draft layers behind the last layer as DeepSeek's.

The draft layers read the target's hidden states after its final norm, the embedding comes first in the projection, and
the embedding at position 0 is masked with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgen import checks
from specgen.models.config import COUNT, FACTOR, SIGMOID_ROUTING, SIZE, check_routing
from specgen.models.dense import DenseForCausalLM
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.draft_head import DraftHead, HeadConvention
from specgen.models.families import DraftLayout, Family
from specgen.models.families.deepseek_v3 import copies, draft_prefix, own_parts
from specgen.models.families.llama import unused
from specgen.models.plans import plan_draft_head, plan_target
from specgen.models.weights import Plan

CONVENTION = HeadConvention(hidden_first=False)
_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MOE_CHECKS: dict[str, checks.Check] = {
    "moe_intermediate_size": SIZE,
    "n_routed_experts": SIZE,
    "n_shared_experts": COUNT,
    "num_experts_per_tok": SIZE,
    "n_group": SIZE,
    "topk_group": SIZE,
    "norm_topk_prob": checks.boolean(),
    "routed_scaling_factor": FACTOR,
}
_CHECKS: dict[str, checks.Check] = _MOE_CHECKS | {
    "first_k_dense_replace": COUNT,
    "use_qk_norm": checks.boolean(),
}
_DEFAULTS = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
}


def parse_config(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a parsed `config.json`; see `parse_dense`."""
    rope = raw.get("rope_parameters")
    defaults: dict[str, Any] = dict(_DEFAULTS)
    if not (isinstance(rope, Mapping) and rope.get("partial_rotary_factor")):
        defaults["partial_rotary_factor"] = 0.5
    fields, values = parse_dense(raw, where, extra_checks=_CHECKS, extra_defaults=defaults, required=SIGMOID_ROUTING)
    config = DenseConfig(
        **fields,
        qkv_bias=values["attention_bias"],
        qk_norm=values["use_qk_norm"],
        head_reads_normed=True,
        moe_layers=frozenset(range(values["first_k_dense_replace"], values["num_hidden_layers"])),
        scoring_func="sigmoid",
        **{name: values[name] for name in _MOE_CHECKS},
    )
    check_routing(config, where)
    return config


def build_draft(
    target: DenseForCausalLM, num_layers: int, names: frozenset[str], dtype: torch.dtype, device: torch.device
) -> DraftHead:
    """The draft layers, with heads and an embedding of their own where the checkpoint stores them."""
    own = own_parts(target.config, num_layers, names)
    positions = target.cos_sin.shape[0]
    return DraftHead(target, target.config, CONVENTION, num_layers, positions, *own, dtype, device)


def plan_draft(head: DraftHead, config: DenseConfig, names: frozenset[str]) -> Plan:
    """Where the draft layers' tensors go."""
    return plan_draft_head(head, _NAMES, lambda i: draft_prefix(config, i), names)


FAMILY = Family(
    parse_config,
    DenseForCausalLM,
    plan_target,
    DraftLayout(draft_prefix, build_draft, plan_draft, copies),
    unused,
)
