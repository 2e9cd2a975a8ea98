"""DeepSeek's multi-token prediction layers: they draft the tokens after the next one.

Layer j at position p reads the embedding of token p+1 and a hidden state from position p (layer 0: the target's,
after its final norm) or p-1 (layer j > 0: layer j-1's output), and predicts token p+2. The hidden states that go on are
the layer's own after `shared_head.norm`, the same ones that its logits are made from.

Properties of the family: the embedding comes first in the projection; at position 0 it is masked with zeros; layer j
has no entry at positions below j.

Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2 (with positions counted from the layer below).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.kernels.draft_layer_inputs import draft_layer_inputs
from specgen.models.attention import MLAAttention
from specgen.models.config import DeepseekV3Config
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.deepseek_v3 import DecoderLayer, DeepseekV3ForCausalLM
from specgen.models.dense_config import DenseConfig
from specgen.models.layers import Embedding, Head, Linear, RMSNorm


class MTPLayer(nn.Module):
    """Two norms, a projection 2H -> H, one decoder layer, and the norm before the head."""

    hidden_first = False
    mask_first_embedding = True

    def __init__(
        self,
        config: DeepseekV3Config | DenseConfig,
        index: int,
        self_attn: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.enorm = RMSNorm(size, eps, dtype, device)
        self.hnorm = RMSNorm(size, eps, dtype, device)
        self.eh_proj = Linear(2 * size, size, dtype, device)
        self.mtp_block = DecoderLayer(config, config.num_hidden_layers + index, self_attn, dtype, device)
        self.final_norm = RMSNorm(size, eps, dtype, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        embedding: torch.Tensor,
        previous: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """The normed hidden states `[T, H]`, for the head and the next layer; `[N, H]` of `outputs`.

        `input_ids [T] int64` are looked up in `embedding [vocab, H]`; `previous [T, H]`.
        """
        embedding_norm, hidden_norm, eps = self.enorm.weight, self.hnorm.weight, self.enorm.eps
        inputs = draft_layer_inputs(
            input_ids, context.positions, embedding, previous, embedding_norm, hidden_norm, eps, self.hidden_first,
            self.mask_first_embedding,
        )  # fmt: skip
        hidden = self.eh_proj(inputs)
        block = self.mtp_block
        normed = block.input_layernorm(hidden)
        return block(normed, hidden, context, kv_cache, cos_sin, self.final_norm, self.index, outputs)[0]


class DraftLayers(nn.Module):
    """Draft layers, with the target's embedding and head unless the checkpoint has own ones."""

    cos_sin: torch.Tensor

    def __init__(
        self,
        target: Any,
        config: DeepseekV3Config | DenseConfig,
        layers: list[MTPLayer],
        own_embedding: bool,
        own_heads: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers` of the shape `config`; `own_heads` names those that bring a head. `cos_sin` is for who derives."""
        super().__init__()
        size, vocab = config.hidden_size, target.config.vocab_size
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.embed_tokens = Embedding(vocab, size, dtype, device) if own_embedding else target.embed_tokens
        self.heads = nn.ModuleList(
            Head(size, vocab, dtype, device) if i in own_heads else target.lm_head for i in range(len(layers))
        )

    @property
    def num_layers(self) -> int:
        """Draft layers; draft step s runs layer s mod this."""
        return len(self.layers)

    @property
    def kv_width(self) -> int:
        """Elements that one token occupies in the KV cache of one draft layer."""
        return self.config.kv_width

    def forward(
        self,
        layer: int,
        input_ids: torch.Tensor,
        previous: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Layer `layer` over `input_ids [T] int64` (the tokens after the positions) -> hidden `[T, H]`.

        `[N, H]` of `outputs`, where it is given; the KV is written for all tokens.
        """
        weight = self.embed_tokens.weight
        return self.layers[layer](input_ids, weight, previous, context, kv_cache, self.cos_sin, outputs)

    def compute_logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`."""
        return self.heads[layer](hidden)


class DeepseekMTP(DraftLayers):
    """The draft layers of a checkpoint of DeepSeek's layout."""

    def __init__(
        self,
        target: DeepseekV3ForCausalLM,
        num_layers: int,
        own_embedding: bool,
        own_heads: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_layers` of the checkpoint's draft layers; `own_heads` names those that bring a head."""
        config, scale = target.config, target.rotary.scale
        layers = [
            MTPLayer(config, i, MLAAttention(config, scale, dtype, device), dtype, device) for i in range(num_layers)
        ]
        super().__init__(target, config, layers, own_embedding, own_heads, dtype, device)
        self.cos_sin = target.rotary.cos_sin
