"""DeepSeek-V3: MLA, dense first layers, then sigmoid-routed experts with shared ones beside them.

Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.1. Knows nothing of drafts; `mtp.py` reuses the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.kernels.block_float8_experts import BlockScales, block_float8_experts
from specgen.kernels.float8_linear import quantize_rows
from specgen.kernels.linear import linear_float32
from specgen.kernels.moe_experts import ExpertScales, moe_experts
from specgen.kernels.moe_routing import route
from specgen.kernels.rms_norm import combine_norm
from specgen.models.attention import MLAAttention
from specgen.models.config import DeepseekV3Config, MoEConfig
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.dense_config import DenseConfig
from specgen.models.layers import MLP, Embedding, Head, RMSNorm, empty_weight
from specgen.models.rope_table import rope_table


class MoE(nn.Module):
    """Top-k of the routed experts by biased sigmoid or softmax scores, plus the shared ones, which stand behind them.

    Routing scores are float32. `w13` and `w2` hold the routed experts and then the shared ones, each as one more expert
    of the same inner size.
    """

    def __init__(self, config: MoEConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        c = config
        self.config = c
        num_experts, inner = c.n_routed_experts + c.n_shared_experts, c.moe_intermediate_size
        self.gate = empty_weight(c.n_routed_experts, c.hidden_size, dtype=torch.float32, device=device)
        has_bias = c.scoring_func == "sigmoid"
        self.correction_bias = (
            empty_weight(c.n_routed_experts, dtype=torch.float32, device=device) if has_bias else None
        )
        self.w13 = empty_weight(num_experts, 2 * inner, c.hidden_size, dtype=dtype, device=device)
        self.w2 = empty_weight(num_experts, c.hidden_size, inner, dtype=dtype, device=device)
        self.scales: ExpertScales | BlockScales | None = None

    def narrow_gate(self, dtype: torch.dtype) -> None:
        """Holds the router's weights in `dtype` if that loses nothing: products of the same values, at less traffic."""
        narrow = self.gate.to(dtype)
        if torch.equal(narrow.float(), self.gate):
            self.gate = nn.Parameter(narrow, requires_grad=False)

    def hold_in_float8(self) -> None:
        """Holds the experts' weights in FP8, rounded, with a scale a row, unless they are in FP8 already."""
        if self.scales is not None:
            return
        (w13, scale13), (w2, scale2) = quantize_rows(self.w13), quantize_rows(self.w2)
        self.w13, self.w2 = nn.Parameter(w13, requires_grad=False), nn.Parameter(w2, requires_grad=False)
        self.scales = ExpertScales(scale13, scale2)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """`(normed, total)`, each `[T, H]`: total is `residual` plus the experts' sum over `x [T, H]`."""
        c = self.config
        weights, ids = route(
            linear_float32(x.to(self.gate.dtype), self.gate),
            self.correction_bias,
            c.num_experts_per_tok,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
            c.n_shared_experts,
            c.scoring_func == "softmax",
        )
        if isinstance(self.scales, BlockScales):
            rows, places = block_float8_experts(x, ids, self.w13, self.w2, self.scales)
        else:
            rows, places = moe_experts(x, ids, self.w13, self.w2, c.n_shared_experts, self.scales)
        return combine_norm(rows, places, weights, residual, norm.weight, norm.eps)


def feed_forward(
    mlp: MoE | MLP, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm(total), total)`, each `[T, H]`: total is `residual` plus what `mlp` makes of `x`."""
    return mlp(x, residual, norm) if isinstance(mlp, MoE) else norm.add(mlp(x), residual)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, with the residual carried beside the hidden states.

    A layer takes its input behind its own norm and gives its output behind the norm that follows it, so that a sum, the
    residual and a norm are one pass over the hidden states. The other families' layers are the same, with another
    attention.
    """

    def __init__(
        self,
        config: DeepseekV3Config | DenseConfig,
        layer: int,
        self_attn: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Layer `layer`, counted through the target's and then the draft layers; whether it has experts follows."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp: MoE | MLP
        if config.is_moe_layer(layer):
            self.mlp = MoE(config, dtype, device)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, device)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        next_norm: RMSNorm,
        key_start: int = 0,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(next_norm(output), output)` of `hidden` = input_layernorm(`residual`), all `[T, H]`.

        With `outputs` both results are those of its rows, `[N, H]`.
        """
        hidden = self.self_attn(hidden, context, kv_cache, cos_sin, key_start, outputs)
        if outputs is not None:
            residual = outputs.of(residual)
            if not len(residual):
                return hidden, residual
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return feed_forward(self.mlp, hidden, residual, next_norm)


class Rotary(nn.Module):
    """The cos and sin table shared by all layers, and the factor it puts on the attention scale."""

    cos_sin: torch.Tensor

    def __init__(self, config: DeepseekV3Config, max_positions: int, device: torch.device) -> None:
        super().__init__()
        table, factor = rope_table(config.qk_rope_head_dim, max_positions, config.rope_theta, config.rope_scaling)
        self.register_buffer("cos_sin", table.to(device), persistent=False)
        self.scale = factor * (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5


class DeepseekV3ForCausalLM(nn.Module):
    """The target: token ids to hidden states, and those to logits where they are wanted.

    The hidden states are what draft layers read: after the final norm, or before it for a head that was trained so.
    """

    def __init__(self, config: DeepseekV3Config, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Unset weights in `dtype` on `device`; `max_positions` is the length of the rotary table."""
        super().__init__()
        self.config = config
        self.head_reads_normed = True
        self.rotary = Rotary(config, max_positions, device)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, MLAAttention(config, self.rotary.scale, dtype, device), dtype, device)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Head(config.hidden_size, config.vocab_size, dtype, device)

    def forward(self, input_ids: torch.Tensor, context: AttentionContext, kv_caches: torch.Tensor) -> torch.Tensor:
        """`input_ids [T] int64`, `kv_caches [layers, blocks, block_size, latent]` -> hidden `[T, H]`."""
        residual: torch.Tensor = self.embed_tokens(input_ids)
        norms: list[Any] = [*(layer.input_layernorm for layer in self.layers), self.norm]
        hidden: torch.Tensor = norms[0](residual)
        for i, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, context, kv_caches[i], self.rotary.cos_sin, norms[i + 1])
        return hidden if self.head_reads_normed else residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`."""
        return self.lm_head(hidden if self.head_reads_normed else self.norm(hidden))
