"""What a model's `config.json` says, read and checked: what every family has, and DeepSeek's shape.

Anything in the file that would change the arithmetic and is not built here is refused by name. The dense families'
shape is in `dense_config`, the families themselves in `families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from specgen import checks
from specgen.errors import ModelError, RecipeError
from specgen.models.fp8 import check_quantization

# What the DeepSeek implementation computes; another value in config.json is refused.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False,
}
SIGMOID_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
SIZE = checks.integer(1, 2**31 - 1, wanted="an integer from 1 up")
COUNT = checks.integer(0, 2**31 - 1, wanted="an integer from 0 up")
_POSITIVE = checks.number(1e-30, 1e30, wanted="a number above 0")
FACTOR = checks.number(-1e30, 1e30, wanted="a number")
# Keys that every family has.
COMMON_CHECKS: dict[str, checks.Check] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_nextn_predict_layers": COUNT,
    "num_attention_heads": SIZE,
    "max_position_embeddings": SIZE,
    "rope_theta": checks.number(1.0 + 1e-9, 1e30, wanted="a number above 1"),
    "rms_norm_eps": _POSITIVE,
    "final_logit_softcapping": checks.optional(_POSITIVE, "null, no cap,"),
}
# Key of config.json -> what its value must be; rope_scaling has a check of its own.
_CHECKS: dict[str, checks.Check] = COMMON_CHECKS | {
    "moe_intermediate_size": SIZE,
    "n_routed_experts": SIZE,
    "n_shared_experts": COUNT,
    "num_experts_per_tok": SIZE,
    "first_k_dense_replace": COUNT,
    "n_group": SIZE,
    "topk_group": SIZE,
    "norm_topk_prob": checks.boolean(),
    "routed_scaling_factor": FACTOR,
    "q_lora_rank": checks.optional(SIZE, "null, no compression,"),
    "kv_lora_rank": SIZE,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "rope_interleave": checks.boolean(),
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


class ModelConfig(Protocol):
    """What the engine asks of a model's shape, whatever its family. Sizes in elements, limits in tokens."""

    @property
    def model_type(self) -> str:
        """The family, as `config.json` names it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        ...

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the target."""
        ...

    @property
    def num_nextn_predict_layers(self) -> int:
        """Draft layers that the checkpoint brings."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def final_logit_softcapping(self) -> float | None:
        """The cap of the logits, cap * tanh(logit / cap); None without one."""
        ...

    @property
    def kv_width(self) -> int:
        """Elements that one token occupies in the KV cache of one layer."""
        ...


class MoEConfig(Protocol):
    """What a layer of routed experts asks of its model's shape."""

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        ...

    @property
    def moe_intermediate_size(self) -> int:
        """Inner elements of one expert."""
        ...

    @property
    def n_routed_experts(self) -> int:
        """Experts to choose from."""
        ...

    @property
    def n_shared_experts(self) -> int:
        """Experts that every token uses."""
        ...

    @property
    def num_experts_per_tok(self) -> int:
        """Experts that a token chooses."""
        ...

    @property
    def n_group(self) -> int:
        """Equal groups of experts."""
        ...

    @property
    def topk_group(self) -> int:
        """Groups that a token may choose from."""
        ...

    @property
    def norm_topk_prob(self) -> bool:
        """Whether the chosen experts' weights are divided by their sum."""
        ...

    @property
    def routed_scaling_factor(self) -> float:
        """Factor of the weights."""
        ...

    @property
    def scoring_func(self) -> str:
        """`sigmoid` or `softmax`."""
        ...


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    """Sizes in elements, named as in the checkpoint's `config.json`; `rope_scaling` is None for plain RoPE.

    scoring_func: `sigmoid`, with a bias for the choice and groups by their two best (V3), or `softmax`, with groups by
    their best (V2). latent_norm_eps: of the norms inside the attention, which the published code does not configure.
    """

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
    final_logit_softcapping: float | None = None
    model_type: str = "deepseek_v3"
    scoring_func: str = "sigmoid"
    latent_norm_eps: float = 1e-6

    @property
    def kv_width(self) -> int:
        """Elements of one token's KV in one layer."""
        return self.latent_size

    @property
    def latent_size(self) -> int:
        """Elements of one token's KV in one layer: the latent and its rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer routes to experts (the first ones are dense; draft layers come after the last)."""
        return layer >= self.first_k_dense_replace


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` of a model folder.

    Raises:
        ModelError: unreadable file, another architecture, a missing key, a value of the wrong kind, or a setting that
            is not supported.
    """
    return parse_config(load_config_json(folder), str(folder / "config.json"))


def load_config_json(folder: Path) -> dict[str, Any]:
    """The object in a folder's `config.json`.

    Raises:
        ModelError: unreadable file, or no JSON object.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}", where=str(path)) from error
    if not isinstance(raw, dict):
        raise ModelError("the configuration is not a JSON object", where=str(path))
    return raw


def parse_config(raw: Any, where: str) -> ModelConfig:
    """The shape in a parsed `config.json`; see `read_config`."""
    from specgen.models.families import find_family  # families are made of models, and those of configurations

    if not isinstance(raw, Mapping):
        raise ModelError("the configuration is not a JSON object", where=where)
    return find_family(raw.get("model_type"), where).parse_config(raw, where)


def parse_deepseek(raw: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The shape in a parsed `config.json` of DeepSeek-V3's layout; see `read_config`."""
    values = read_deepseek_values(raw, {}, where, SIGMOID_ROUTING)
    return make_deepseek(values | {"model_type": raw["model_type"]}, where)


def make_deepseek(values: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The configuration of checked values.

    Raises:
        ModelError: values that are right alone do not go together.
    """
    config = DeepseekV3Config(**values)
    check_routing(config, where)
    if config.qk_rope_head_dim % 2:
        raise ModelError(f"qk_rope_head_dim must be even, not {config.qk_rope_head_dim}", where=where)
    return config


def read_deepseek_values(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str, required: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The checked values of DeepSeek-V3 or a relative, `defaults` over V3's; see `read_values`.

    `required`: further keys of which only one value is built.
    """
    refuse_unsupported(raw, _REQUIRED | dict(required or {}), where)
    return read_values(raw, _CHECKS, {**_DEFAULTS, **defaults}, where, none_means={"n_shared_experts": 0})


def read_values(
    raw: Mapping[str, Any],
    wanted: Mapping[str, checks.Check],
    defaults: Mapping[str, Any],
    where: str,
    none_means: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The values of all `wanted` keys, checked, and `rope_scaling`.

    null is as good as not written: it stands for the default, or for what `none_means` says.

    Raises:
        ModelError: a key is missing or its value is of the wrong kind.
    """
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_parameters must be an object, not {checks.shown(rope)}", where=where)
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    defaults = {"rope_theta": 10000.0, "final_logit_softcapping": None, **defaults}
    values = defaults | {name: raw[name] for name in wanted if name in raw}
    if rope.get("rope_theta") is not None:
        values["rope_theta"] = rope["rope_theta"]  # transformers 5 writes it here, and reads it here first
    nulls = {**defaults, **(none_means or {})}
    values |= {name: nulls.get(name) for name, value in values.items() if value is None}
    missing = [name for name in wanted if name not in values]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(sorted(missing))}", where=where)
    for name, check in wanted.items():
        try:
            values[name] = check(values[name])
        except ValueError as error:
            raise ModelError(f"{name} {error}", where=where) from None
    try:
        check_rope_scaling(scaling)
    except ValueError as error:
        raise ModelError(str(error), where=where) from None
    return {name: values[name] for name in wanted} | {"rope_scaling": scaling}


def refuse_unsupported(raw: Mapping[str, Any], required: Mapping[str, Any], where: str) -> None:
    """Raises ModelError where a key has another value than the one that is built, or for quantisation that is not."""
    for key, wanted in required.items():
        if raw.get(key) not in (None, wanted):
            refuse(key, raw[key], repr(wanted), where)
    check_quantization(raw.get("quantization_config"), where)


def refuse(key: str, value: object, supported: str, where: str) -> NoReturn:
    """Raises ModelError for a setting that is not built."""
    raise ModelError(f"{key} = {checks.shown(value)} is not supported", where=where, hint=f"supported: {supported}")


def check_routing(config: MoEConfig, where: str) -> None:
    """Raises ModelError where numbers of experts that are right alone do not go together."""
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        raise ModelError("n_group must divide n_routed_experts, and topk_group must not exceed it", where=where)
    num_experts = config.n_routed_experts // config.n_group * config.topk_group
    if config.num_experts_per_tok > num_experts:
        raise ModelError(f"num_experts_per_tok exceeds the {num_experts} experts that there are to choose", where=where)


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
            (FACTOR if key in ("mscale", "mscale_all_dim") else _POSITIVE)(scaling[key])
        except ValueError as error:
            raise ValueError(f"rope_scaling: {key} {error}") from None
    if kind == "llama3" and scaling["high_freq_factor"] == scaling["low_freq_factor"]:
        raise ValueError("rope_scaling: high_freq_factor and low_freq_factor must differ")
    return kind


def resolve_max_model_len(wanted: int | None, config: ModelConfig, where: str | None = None) -> int:
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
