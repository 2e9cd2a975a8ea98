"""Which tensor of a checkpoint goes where: published names against the parts of our models.

A plan names every tensor that a model needs; products that we fuse are filled slice by slice. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specgen.models.attention import MLAAttention
from specgen.models.config import DeepseekV3Config
from specgen.models.deepseek_v3 import DecoderLayer, DeepseekV3ForCausalLM, MoE
from specgen.models.dense import DenseForCausalLM, GQAAttention
from specgen.models.draft_head import DraftHead, DraftLayer
from specgen.models.layers import MLP
from specgen.models.mtp import DeepseekMTP
from specgen.models.weights import Plan, Target


def whole(weight: torch.Tensor) -> Target:
    """A tensor that fills a weight, or a view of one, as it is."""
    return Target(tuple(weight.shape), [(weight, None)])


def plan_mlp(plan: Plan, prefix: str, mlp: MLP) -> None:
    """Adds a gated MLP's tensors."""
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    plan[prefix + "gate_proj.weight"] = whole(gate)
    plan[prefix + "up_proj.weight"] = whole(up)
    plan[prefix + "down_proj.weight"] = whole(mlp.down_proj.weight)


def plan_moe(plan: Plan, prefix: str, moe: MoE) -> None:
    """Adds the tensors of routed experts, their router and the shared experts."""
    plan[prefix + "gate.weight"] = whole(moe.gate)
    if moe.correction_bias is not None:
        plan[prefix + "gate.e_score_correction_bias"] = whole(moe.correction_bias)
    for i in range(moe.config.n_routed_experts):
        gate, up = moe.w13[i].chunk(2)
        plan[f"{prefix}experts.{i}.gate_proj.weight"] = whole(gate)
        plan[f"{prefix}experts.{i}.up_proj.weight"] = whole(up)
        plan[f"{prefix}experts.{i}.down_proj.weight"] = whole(moe.w2[i])
    if num_shared := moe.config.n_shared_experts:
        # Stored as one wide expert, held as several of the routed ones' size.
        gate, up = moe.w13[-num_shared:].unflatten(1, (2, -1)).unbind(1)
        size, inner = gate.shape[2], gate.shape[1]
        shape = (num_shared * inner, size)
        for name, part in (("gate_proj", gate), ("up_proj", up)):
            plan[f"{prefix}shared_experts.{name}.weight"] = Target(shape, [(part, lambda t: t.view(-1, inner, size))])
        plan[f"{prefix}shared_experts.down_proj.weight"] = Target(
            (size, num_shared * inner), [(moe.w2[-num_shared:], lambda t: t.view(size, -1, inner).transpose(0, 1))]
        )


def plan_mla(plan: Plan, prefix: str, attn: MLAAttention) -> None:
    """Adds the tensors of a layer's latent attention."""
    a_weight = attn.qkv_a_proj.weight
    if attn.has_q_lora:
        plan[prefix + "q_a_proj.weight"] = whole(a_weight[: attn.q_size])
        plan[prefix + "q_a_layernorm.weight"] = whole(attn.q_a_layernorm.weight)
        plan[prefix + "q_b_proj.weight"] = whole(attn.q_b_proj.weight)
    else:
        plan[prefix + "q_proj.weight"] = whole(a_weight[: attn.q_size])
    plan[prefix + "kv_a_proj_with_mqa.weight"] = whole(a_weight[attn.q_size :])
    plan[prefix + "kv_a_layernorm.weight"] = whole(attn.kv_a_layernorm.weight)
    heads, nope, value, rank = attn.num_heads, attn.nope, attn.value, attn.rank
    plan[prefix + "kv_b_proj.weight"] = Target(
        (heads * (nope + value), rank),
        [
            (attn.w_uk.transpose(1, 2), lambda t: t.view(heads, nope + value, rank)[:, :nope]),
            (attn.w_uv, lambda t: t.view(heads, nope + value, rank)[:, nope:]),
        ],
    )
    plan[prefix + "o_proj.weight"] = whole(attn.o_proj.weight)


def plan_gqa(plan: Plan, prefix: str, attn: GQAAttention) -> None:
    """Adds the tensors of a layer's grouped-query attention."""
    num_q, num_kv = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    parts = [num_q, num_kv, num_kv]
    for name, weight in zip("qkv", attn.qkv_proj.weight.split(parts), strict=True):
        plan[f"{prefix}{name}_proj.weight"] = whole(weight)
    if attn.qkv_bias is not None:
        for name, bias in zip("qkv", attn.qkv_bias.split(parts), strict=True):
            plan[f"{prefix}{name}_proj.bias"] = whole(bias)
    plan[prefix + "o_proj.weight"] = whole(attn.o_proj.weight)
    if attn.o_bias is not None:
        plan[prefix + "o_proj.bias"] = whole(attn.o_bias)
    if attn.q_norm is not None and attn.k_norm is not None:
        plan[prefix + "q_norm.weight"] = whole(attn.q_norm)
        plan[prefix + "k_norm.weight"] = whole(attn.k_norm)


def plan_decoder_layer(plan: Plan, prefix: str, layer: DecoderLayer) -> None:
    """Adds the tensors of a decoder layer."""
    plan[prefix + "input_layernorm.weight"] = whole(layer.input_layernorm.weight)
    plan[prefix + "post_attention_layernorm.weight"] = whole(layer.post_attention_layernorm.weight)
    if isinstance(layer.self_attn, GQAAttention):
        plan_gqa(plan, prefix + "self_attn.", layer.self_attn)
    else:
        assert isinstance(layer.self_attn, MLAAttention)
        plan_mla(plan, prefix + "self_attn.", layer.self_attn)
    if isinstance(layer.mlp, MoE):
        plan_moe(plan, prefix + "mlp.", layer.mlp)
    else:
        plan_mlp(plan, prefix + "mlp.", layer.mlp)


def plan_target(model: DeepseekV3ForCausalLM | DenseForCausalLM) -> Plan:
    """Every tensor of the target, by its name in a checkpoint."""
    plan: Plan = {
        "model.embed_tokens.weight": whole(model.embed_tokens.weight),
        "model.norm.weight": whole(model.norm.weight),
    }
    if model.lm_head.weight is not model.embed_tokens.weight:
        plan["lm_head.weight"] = whole(model.lm_head.weight)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        plan_decoder_layer(plan, f"model.layers.{i}.", layer)
    return plan


def plan_mtp(mtp: DeepseekMTP, config: DeepseekV3Config, names: frozenset[str]) -> Plan:
    """Every tensor of the draft layers: they stand behind the target's layers; own embedding and heads where stored."""
    plan: Plan = {}
    for i, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{config.num_hidden_layers + i}."
        plan_decoder_layer(plan, prefix, layer.mtp_block)  # type: ignore[arg-type]
        for name in ("enorm", "hnorm", "eh_proj"):
            plan[f"{prefix}{name}.weight"] = whole(getattr(layer, name).weight)
        plan[prefix + "shared_head.norm.weight"] = whole(layer.final_norm.weight)  # type: ignore[arg-type, union-attr]
        if prefix + "shared_head.head.weight" in names:
            plan[prefix + "shared_head.head.weight"] = whole(mtp.heads[i].weight)  # type: ignore[arg-type]
    embedding = f"model.layers.{config.num_hidden_layers}.embed_tokens.weight"
    if embedding in names:
        plan[embedding] = whole(mtp.embed_tokens.weight)
    return plan


def plan_draft_head(
    head: DraftHead, names: tuple[str, str, str, str], prefix: Callable[[int], str], stored: frozenset[str]
) -> Plan:
    """Every tensor of draft layers over the dense decoder layer; own embedding and heads where they are stored.

    `names` of the norm of the embedding, of the hidden state, of the projection and of the final norm; `prefix(i)` is
    what layer i's tensors begin with.
    """
    plan: Plan = {}
    for i, layer in enumerate(head.layers):
        assert isinstance(layer, DraftLayer)
        plan_decoder_layer(plan, prefix(i), layer.mtp_block)
        parts = (layer.enorm, layer.hnorm, layer.eh_proj, layer.final_norm)
        for name, part in zip(names, parts, strict=True):
            plan[f"{prefix(i)}{name}.weight"] = whole(part.weight)  # type: ignore[arg-type]
        own_head = prefix(i) + "shared_head.head.weight"
        if own_head in stored:
            plan[own_head] = whole(head.heads[i].weight)  # type: ignore[arg-type]
    own_embedding = prefix(0) + "embed_tokens.weight"
    if own_embedding in stored:
        plan[own_embedding] = whole(head.embed_tokens.weight)  # type: ignore[arg-type]
    return plan
