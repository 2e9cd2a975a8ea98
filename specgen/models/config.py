"""A DeepSeek-V3-layout model's shape, read from `config.json` and checked.

Anything in the file that would change the arithmetic and is not built here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen import checks
from specgen.errors import ModelError, RecipeError

# What this implementation computes; another value in config.json is refused.
_REQUIRED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
_SIZE = checks.integer(1, 2**31 - 1, wanted="an integer from 1 up")
_COUNT = checks.integer(0, 2**31 - 1, wanted="an integer from 0 up")
_POSITIVE = checks.number(1e-30, 1e30, wanted="a number above 0")
_FACTOR = checks.number(-1e30, 1e30, wanted="a number")
# Key of config.json -> what its value must be; rope_scaling has a check of its own.
_CHECKS: dict[str, checks.Check] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "moe_intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_nextn_predict_layers": _COUNT,
    "num_attention_heads": _SIZE,
    "n_routed_experts": _SIZE,
    "n_shared_experts": _COUNT,
    "num_experts_per_tok": _SIZE,
    "first_k_dense_replace": _COUNT,
    "n_group": _SIZE,
    "topk_group": _SIZE,
    "norm_topk_prob": checks.boolean(),
    "routed_scaling_factor": _FACTOR,
    "q_lora_rank": checks.optional(_SIZE, "null, no compression,"),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "max_position_embeddings": _SIZE,
    "rope_theta": checks.number(1.0 + 1e-9, 1e30, wanted="a number above 1"),
    "rope_interleave": checks.boolean(),
    "rms_norm_eps": _POSITIVE,
}
_DEFAULTS: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
}
# Type of rope scaling -> the keys it needs, all of them numbers.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


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
        ModelError: unreadable file, another architecture, a missing key, a value of the wrong kind, or a setting that
            is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}", where=str(path)) from error
    return parse_config(raw, str(path))


def parse_config(raw: Any, where: str) -> DeepseekV3Config:
    """The shape in a parsed `config.json`; see `read_config`."""
    if not isinstance(raw, Mapping):
        raise ModelError("the configuration is not a JSON object", where=where)
    _refuse_unsupported(raw, where)
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_parameters must be an object, not {checks.shown(rope)}", where=where)
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    defaults = _DEFAULTS | {"rope_theta": rope.get("rope_theta", 10000.0)}
    values = defaults | {name: raw[name] for name in _CHECKS if name in raw}
    # null is as good as not written; only for the shared experts it says that there are none.
    values |= {name: (defaults | {"n_shared_experts": 0}).get(name) for name, value in values.items() if value is None}
    missing = [name for name in _CHECKS if name not in values]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(sorted(missing))}", where=where)
    for name, check in _CHECKS.items():
        try:
            values[name] = check(values[name])
        except ValueError as error:
            raise ModelError(f"{name} {error}", where=where) from None
    try:
        check_rope_scaling(scaling)
    except ValueError as error:
        raise ModelError(str(error), where=where) from None
    config = DeepseekV3Config(**values, rope_scaling=scaling)
    _check_together(config, where)
    return config


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("model_type")
    if kind != "deepseek_v3":
        raise ModelError(f"model_type {kind!r} is not supported", where=where, hint="supported: deepseek_v3")
    for key, wanted in _REQUIRED.items():
        if raw.get(key, wanted) != wanted:
            raise ModelError(f"{key} = {raw[key]!r} is not supported", where=where, hint=f"supported: {wanted!r}")
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else checks.shown(quantization)
        raise ModelError(
            f"quantised weights ({method}) are not supported", where=where, hint="use a bf16 or float32 checkpoint"
        )


def _check_together(config: DeepseekV3Config, where: str) -> None:
    """Raise where values that are right alone do not go together."""
    problem = None
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        problem = "n_group must divide n_routed_experts, and topk_group must not exceed it"
    elif config.num_experts_per_tok > config.n_routed_experts // config.n_group * config.topk_group:
        problem = "num_experts_per_tok exceeds the experts in topk_group groups"
    elif config.qk_rope_head_dim % 2:
        problem = f"qk_rope_head_dim must be even, not {config.qk_rope_head_dim}"
    if problem is not None:
        raise ModelError(problem, where=where)


def check_rope_scaling(scaling: object) -> str:
    """Return the type that a config's `rope_scaling` (None: "default") names, once its keys were looked at.

    Raises: ValueError for an unknown type, or a key that is missing or no number above 0, naming it.
    """
    if scaling is None:
        return "default"
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling must be an object, not {checks.shown(scaling)}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ValueError(f"rope_scaling: unknown type {checks.shown(kind)}; known are {', '.join(_ROPE_KEYS)}")
    for key in _ROPE_KEYS[kind]:
        if scaling.get(key) is None:
            raise ValueError(f"rope_scaling: type {kind!r} needs the key {key!r}")
    for key in (*_ROPE_KEYS[kind], *(_YARN_OPTIONS if kind == "yarn" else ())):
        if scaling.get(key) is None:
            continue
        try:
            (_FACTOR if key in ("mscale", "mscale_all_dim") else _POSITIVE)(scaling[key])
        except ValueError as error:
            raise ValueError(f"rope_scaling: {key} {error}") from None
    if kind == "llama3" and scaling["high_freq_factor"] == scaling["low_freq_factor"]:
        raise ValueError("rope_scaling: high_freq_factor and low_freq_factor must differ")
    return kind


def resolve_max_model_len(wanted: int | None, config: DeepseekV3Config, where: str | None = None) -> int:
    """Return the most tokens that prompt and answer have together: `wanted`, or the model's limit if it is None.

    Raises: RecipeError at `where` if the model's limit is lower than what is wanted.
    """
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise RecipeError(
            f"engine.max_model_len is {wanted}; the model's limit is {limit} tokens",
            where=where,
            hint="lower it, or leave it out for the model's limit",
        )
    return limit if wanted is None else wanted
