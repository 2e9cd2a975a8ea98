"""A DeepSeek-V3-layout model's shape, read from `config.json` and checked.

Anything in the file that would change the arithmetic and is not built here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import ModelError

# What this implementation computes; another value in config.json is refused.
_REQUIRED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    """Sizes in elements, named as in the checkpoint's `config.json`; `rope_scaling` is None for plain RoPE."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rope_interleave: bool
    rms_norm_eps: float

    @property
    def latent_size(self) -> int:
        """Elements of one token's KV in one layer: the latent and its rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer routes to experts (the first ones are dense; draft layers come after the last)."""
        return layer >= self.first_k_dense_replace


def read_config(folder: Path) -> DeepseekV3Config:
    """Reads `config.json` of a model folder.

    Raises:
        ModelError: unreadable file, another architecture, a missing key, or a setting that is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}", where=str(path)) from error
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The shape in a parsed `config.json`; see `read_config`."""
    kind = raw.get("model_type")
    if kind != "deepseek_v3":
        raise ModelError(f"model_type {kind!r} is not supported", where=where, hint="supported: deepseek_v3")
    for key, wanted in _REQUIRED.items():
        if raw.get(key, wanted) != wanted:
            raise ModelError(f"{key} = {raw[key]!r} is not supported", where=where, hint=f"supported: {wanted!r}")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise ModelError(
            f"quantised weights ({method}) are not supported", where=where, hint="use a bf16 or float32 checkpoint"
        )
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    values = {
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "rope_interleave": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10000.0),
        **raw,
        "rope_scaling": scaling,
    }
    names = DeepseekV3Config.__dataclass_fields__
    missing = sorted(name for name in names if name not in values)
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}", where=where)
    return DeepseekV3Config(**{name: values[name] for name in names})
