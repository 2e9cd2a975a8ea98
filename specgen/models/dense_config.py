"""The shape of a model with grouped-query attention, dense or with routed experts: what families differ in, as fields.

A family's parser fills the fields from its own keys of `config.json`; `parse_dense` does what they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgen import checks
from specgen.errors import ModelError
from specgen.models.config import COMMON_CHECKS, SIZE, read_values, refuse, refuse_unsupported

_REQUIRED = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
_CHECKS: dict[str, checks.Check] = COMMON_CHECKS | {
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "tie_word_embeddings": checks.boolean(),
    "attention_bias": checks.boolean(),
    "partial_rotary_factor": checks.number(1e-6, 1.0, wanted="a number above 0 and up to 1"),
}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Sizes in elements. `rope_scaling` is None for plain RoPE.

    rotary_dim: how many of a head's elements turn. qkv_bias, o_bias: whether these products have one. qk_norm: whether
    query and key heads are normed. head_reads_normed: whether draft layers read the target's hidden states after its
    final norm (else before). moe_layers: the layers that route to experts; the fields behind it say how.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    final_logit_softcapping: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    head_reads_normed: bool = False
    moe_layers: frozenset[int] = frozenset()
    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    scoring_func: str = "softmax"

    @property
    def kv_width(self) -> int:
        """Elements of one token's KV in one layer: its key heads and its value heads."""
        return 2 * self.num_key_value_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer routes to experts; draft layers, behind the last one, do what that one does."""
        return min(layer, self.num_hidden_layers - 1) in self.moe_layers


def parse_dense(
    raw: Mapping[str, Any],
    where: str,
    *,
    extra_checks: Mapping[str, checks.Check] | None = None,
    extra_defaults: Mapping[str, Any] | None = None,
    required: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that all families read alike, and the checked values of every key, `extra_checks` among them.

    `required`: further keys of which only one value is built.

    Raises:
        ModelError: a missing key, a value of the wrong kind, or a setting that is not supported.
    """
    refuse_unsupported(raw, _REQUIRED | dict(required or {}), where)
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        refuse("layer_types", next(kind for kind in kinds if kind != "full_attention"), "'full_attention'", where)
    rope = raw.get("rope_parameters")
    defaults: dict[str, Any] = {
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": raw.get("num_attention_heads"),
        "head_dim": _quotient(raw.get("hidden_size"), raw.get("num_attention_heads")),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": (rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None) or 1.0,
    }
    values = read_values(raw, _CHECKS | dict(extra_checks or {}), defaults | dict(extra_defaults or {}), where)
    heads, kv_heads, head_dim = values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]
    rotary_dim = int(head_dim * values["partial_rotary_factor"])
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}", where=where)
    if rotary_dim % 2 or rotary_dim == 0:
        raise ModelError(f"the rotated part of a head must be even, not {rotary_dim} of {head_dim}", where=where)
    shared = (*COMMON_CHECKS, "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_scaling")
    fields = {name: values[name] for name in shared}
    return fields | {"model_type": raw.get("model_type"), "rotary_dim": rotary_dim}, values


def _quotient(size: object, heads: object) -> object:
    """The head size that a configuration leaves out; None if that, too, is not there."""
    if isinstance(size, int) and isinstance(heads, int) and heads > 0:
        return max(size // heads, 1)
    return None
