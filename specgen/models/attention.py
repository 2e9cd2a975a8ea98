"""Multi-head latent attention in its absorbed form: queries meet the cached latent itself.

    q_nope · W_uk  gives a query in latent space; scores are its product with [latent; rotary key]; the weighted latents
    go through W_uv to values. Nothing per head is cached.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import nn

from specgen.kernels.linear import batched_linear
from specgen.kernels.mla_attention import mla_attention
from specgen.kernels.mla_inputs import mla_inputs
from specgen.models.config import DeepseekV3Config
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.layers import Linear, RMSNorm, empty_weight


class MLAAttention(nn.Module):
    """One layer's attention over the paged latent cache.

    `qkv_a_proj` holds the products that read the layer's input: [q_a; kv_a] with a query latent, else [q; kv_a].
    """

    def __init__(self, config: DeepseekV3Config, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        """`scale` multiplies the scores (1/sqrt(head size), times YaRN's factor)."""
        super().__init__()
        c = config
        self.num_heads = c.num_attention_heads
        self.nope, self.rope, self.rank, self.value = (
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.kv_lora_rank,
            c.v_head_dim,
        )
        self.scale = scale
        self.interleave = c.rope_interleave
        num_q = self.num_heads * (self.nope + self.rope)
        self.q_size = c.q_lora_rank or num_q
        self.qkv_a_proj = Linear(c.hidden_size, self.q_size + c.latent_size, dtype, device)
        if c.q_lora_rank:
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype, device)
            self.q_b_proj = Linear(c.q_lora_rank, num_q, dtype, device)
        self.has_q_lora = bool(c.q_lora_rank)
        self.kv_a_layernorm = RMSNorm(self.rank, c.latent_norm_eps, dtype, device)
        self.w_uk = empty_weight(self.num_heads, self.rank, self.nope, dtype=dtype, device=device)
        self.w_uv = empty_weight(self.num_heads, self.value, self.rank, dtype=dtype, device=device)
        self.o_proj = Linear(self.num_heads * self.value, c.hidden_size, dtype, device)

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

        `kv_cache [blocks, block_size, latent]`.
        """
        q = self._queries(hidden, context, kv_cache, cos_sin, outputs)
        if outputs is not None:
            context = outputs.context
            if not len(outputs.rows):
                return hidden[:0]
        latent = mla_attention(
            q,
            kv_cache,
            context.block_tables,
            context.idx_mapping,
            context.query_start_loc,
            context.seq_lens,
            self.rank,
            self.scale,
            context.max_query_len,
            context.max_seq_len,
            key_start,
        )
        out = batched_linear(latent, self.w_uv)
        return self.o_proj(out.reshape(len(q), self.num_heads * self.value))

    def _queries(
        self,
        hidden: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        outputs: OutputRows | None,
    ) -> torch.Tensor:
        """The queries in latent space, `[T, heads, latent]` or `[N, ...]` of `outputs`; all tokens' KV is written.

        What they are made from is given back before the attention takes its own memory.
        """
        qkv = self.qkv_a_proj(hidden)
        if outputs is not None:
            no_heads = qkv.new_empty(len(qkv), 0, self.rank + self.rope)
            self._prepare(qkv[:, self.q_size :], no_heads[..., self.rank :], context, kv_cache, cos_sin, no_heads)
            if not len(outputs.rows):
                return no_heads
            qkv, context = outputs.of(qkv), outputs.context
        q, latent = qkv.split([self.q_size, self.rank + self.rope], dim=-1)
        if self.has_q_lora:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_nope, q_pe = q.unflatten(1, (self.num_heads, -1)).split([self.nope, self.rope], dim=-1)
        q_latent = hidden.new_empty(len(qkv), self.num_heads, self.rank + self.rope)
        self._prepare(latent, q_pe, context, kv_cache, cos_sin, q_latent)
        batched_linear(q_nope, self.w_uk, out=q_latent[..., : self.rank])
        return q_latent

    def _prepare(
        self,
        latent: torch.Tensor,
        q_pe: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        q_latent: torch.Tensor,
    ) -> None:
        """The latents are in the cache, `q_pe`, rotated, in the last columns of `q_latent`; see `mla_inputs`."""
        norm, positions, slots = self.kv_a_layernorm, context.positions, context.slot_mapping
        mla_inputs(
            latent, q_pe, norm.weight, norm.eps, positions, cos_sin, self.interleave, slots, kv_cache, q_latent
        )  # fmt: skip
