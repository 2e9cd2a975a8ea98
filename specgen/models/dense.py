"""The decoder that most families share: grouped-query attention and a gated MLP or routed experts, norms before both.

What families differ in are fields of `DenseConfig`. Knows nothing of drafts; `draft_head` reuses the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.kernels.gqa_attention import gqa_attention
from specgen.kernels.prepare_qkv import prepare_qkv
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.deepseek_v3 import DecoderLayer
from specgen.models.dense_config import DenseConfig
from specgen.models.layers import Embedding, Head, Linear, RMSNorm, empty_weight
from specgen.models.rope_table import rope_table


class GQAAttention(nn.Module):
    """One layer's attention over the paged cache of keys and values.

    `qkv_proj` holds the three products that read the layer's input, queries first.
    """

    def __init__(self, config: DenseConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.eps = c.rms_norm_eps
        self.scale = c.head_dim**-0.5
        num_q, num_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(c.hidden_size, num_q + 2 * num_kv, dtype, device)
        self.o_proj = Linear(num_q, c.hidden_size, dtype, device)

        def vector(size: int, wanted: bool) -> nn.Parameter | None:
            return empty_weight(size, dtype=dtype, device=device) if wanted else None

        self.qkv_bias = vector(num_q + 2 * num_kv, c.qkv_bias)
        self.o_bias = vector(c.hidden_size, c.o_bias)
        self.q_norm = vector(c.head_dim, c.qk_norm)
        self.k_norm = vector(c.head_dim, c.qk_norm)

    def forward(
        self,
        hidden: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        key_start: int,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`, or `[N, hidden]` of `outputs`; all tokens' KV is in `kv_cache` first.

        `kv_cache [blocks, block_size, kv_width]`.
        """
        q = prepare_qkv(
            self.qkv_proj(hidden),
            context.positions,
            cos_sin,
            context.slot_mapping,
            kv_cache,
            self.num_heads,
            self.num_kv_heads,
            self.qkv_bias,
            self.q_norm,
            self.k_norm,
            self.eps,
        )
        if outputs is not None:
            if not len(outputs.rows):
                return hidden[:0]
            q, context = outputs.of(q), outputs.context
        out = gqa_attention(
            q,
            kv_cache,
            context.block_tables,
            context.idx_mapping,
            context.query_start_loc,
            context.seq_lens,
            self.num_kv_heads,
            self.scale,
            context.max_query_len,
            context.max_seq_len,
            key_start,
        )
        out = self.o_proj(out.flatten(1))
        return out if self.o_bias is None else out + self.o_bias


def rotary_table(config: DenseConfig, max_positions: int, device: torch.device) -> torch.Tensor:
    """The cosines and sines of the positions below `max_positions`, `[max_positions, rotary_dim] float32`.

    YaRN's factor for the softmax is DeepSeek's own, and not these families'.
    """
    return rope_table(config.rotary_dim, max_positions, config.rope_theta, config.rope_scaling)[0].to(device)


class DenseForCausalLM(nn.Module):
    """The target: token ids to hidden states, and those to logits where they are wanted.

    The hidden states are what draft layers read: the residual stream before the final norm, or after it where the
    configuration says `head_reads_normed`.
    """

    cos_sin: torch.Tensor

    def __init__(self, config: DenseConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Unset weights in `dtype` on `device`; `max_positions` is the length of the rotary table."""
        super().__init__()
        self.config = config
        self.head_reads_normed = config.head_reads_normed
        self.register_buffer("cos_sin", rotary_table(config, max_positions, device), persistent=False)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, GQAAttention(config, dtype, device), dtype, device)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Head(config.hidden_size, config.vocab_size, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, context: AttentionContext, kv_caches: torch.Tensor) -> torch.Tensor:
        """`input_ids [T] int64`, `kv_caches [layers, blocks, block_size, kv_width]` -> hidden `[T, H]`."""
        residual: torch.Tensor = self.embed_tokens(input_ids)
        norms: list[Any] = [*(layer.input_layernorm for layer in self.layers), self.norm]
        hidden: torch.Tensor = norms[0](residual)
        for i, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, context, kv_caches[i], self.cos_sin, norms[i + 1])
        return hidden if self.head_reads_normed else residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`."""
        return self.lm_head(hidden if self.head_reads_normed else self.norm(hidden))
