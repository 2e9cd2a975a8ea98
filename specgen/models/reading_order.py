"""Which weights are read behind each norm and each attention's inputs, so that kernels there ask for them ahead.

Set once weights are what they stay: their addresses are kept.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from specgen.kernels.ahead import reads_ahead
from specgen.models.attention import MLAAttention
from specgen.models.cheap_drafts import CutHead, Float8Linear
from specgen.models.deepseek_v3 import DecoderLayer, MoE
from specgen.models.dense import DenseLayer
from specgen.models.draft_head import DraftLayer
from specgen.models.families import DraftModel, TargetModel
from specgen.models.kept_float8 import BlockFloat8Linear
from specgen.models.mtp import MTPLayer


def read_ahead(target: TargetModel, mtp: DraftModel | None) -> None:
    """Tells the norms and attentions of both models what is read behind them."""
    modules: list[Any] = [target] if mtp is None else [target, mtp]
    for part in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(part, DecoderLayer | DenseLayer):
            _layer_reads(part)
    _norm_reads(target.norm, target.lm_head)  # type: ignore[attr-defined]
    for layer, head in zip(mtp.layers, mtp.heads, strict=True) if mtp is not None else ():
        if isinstance(layer, MTPLayer):
            _norm_reads(layer.enorm, layer.eh_proj)
            _norm_reads(layer.shared_head_norm, head)
        elif isinstance(layer, DraftLayer):
            _norm_reads(layer.embedding_norm, layer.projection)
            _norm_reads(layer.final_norm, head)


def _layer_reads(layer: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    if isinstance(attention, MLAAttention):
        further = [attention.q_b_proj] if attention.has_q_lora else []
        _norm_reads(layer.input_layernorm, attention.qkv_a_proj, *further, attention.w_uk)
        attention.ahead = reads_ahead([attention.w_uv, *_weights(attention.o_proj)])
    else:
        _norm_reads(layer.input_layernorm, attention.qkv_proj)
        attention.ahead = reads_ahead(_weights(attention.o_proj))
    if isinstance(mlp, MoE):
        shared = mlp.w13[mlp.config.n_routed_experts :]
        layer.post_attention_layernorm.ahead = reads_ahead([mlp.gate, shared])
    else:
        _norm_reads(layer.post_attention_layernorm, mlp.gate_up_proj)


def _norm_reads(norm: Any, *parts: Any) -> None:
    norm.ahead = reads_ahead([weight for part in parts for weight in _weights(part)])


def _weights(part: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """What a product of few rows reads."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, CutHead):
        return _weights(part.lowest)
    if isinstance(part, Float8Linear):
        return list(part.rounded)
    if isinstance(part, BlockFloat8Linear):
        return [part.values, part.scale]
    weight: torch.Tensor = part.weight  # type: ignore[assignment]
    return [weight]
