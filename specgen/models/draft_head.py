"""Draft layers over the dense decoder layer: MiMo's, GLM-4's, and heads of MiMo's layout that come in their own folder.

Layer j at position p reads the embedding of token p+1 and a hidden state from position p (layer 0: the target's) or p-1
(layer j > 0: layer j-1's output), and predicts token p+2. What goes on to the next layer or step is the layer's own
output after its final norm, the same that its logits are made from. In which order the two inputs go into the
projection, and whether the embedding at position 0 is masked with zeros, is declared by the family.

Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; MiMo, arXiv 2505.07608, section 2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from specgen.kernels.draft_layer_inputs import draft_layer_inputs
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.dense import DenseLayer, rotary_table
from specgen.models.dense_config import DenseConfig
from specgen.models.layers import Embedding, Head, Linear, RMSNorm


class HeadConvention(NamedTuple):
    """What a head was trained with, and its tensors don't tell."""

    hidden_first: bool
    mask_first_embedding: bool = True


class DraftLayer(nn.Module):
    """Two norms, a projection 2H -> H, one decoder layer, and the norm before the head."""

    def __init__(
        self, config: DenseConfig, index: int, convention: HeadConvention, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.hidden_first, self.mask_first_embedding = convention
        self.embedding_norm = RMSNorm(size, eps, dtype, device)
        self.hidden_norm = RMSNorm(size, eps, dtype, device)
        self.projection = Linear(2 * size, size, dtype, device)
        self.block = DenseLayer(config, config.num_hidden_layers + index, dtype, device)
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
        embedding_norm, hidden_norm, eps = self.embedding_norm.weight, self.hidden_norm.weight, self.embedding_norm.eps
        inputs = draft_layer_inputs(
            input_ids, context.positions, embedding, previous, embedding_norm, hidden_norm, eps, self.hidden_first,
            self.mask_first_embedding,
        )  # fmt: skip
        hidden = self.projection(inputs)
        block = self.block
        normed = block.input_layernorm(hidden)
        return block(normed, hidden, context, kv_cache, cos_sin, self.final_norm, self.index, outputs)[0]


class DraftHead(nn.Module):
    """The draft layers, with the target's embedding and head unless the checkpoint has own ones."""

    cos_sin: torch.Tensor

    def __init__(
        self,
        target: Any,
        config: DenseConfig,
        convention: HeadConvention,
        num_layers: int,
        max_positions: int,
        own_embedding: bool,
        own_heads: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_layers` draft layers of the shape `config`; `own_heads` names those that bring a head."""
        super().__init__()
        size, vocab = config.hidden_size, target.config.vocab_size
        self.config = config
        self.register_buffer("cos_sin", rotary_table(config, max_positions, device), persistent=False)
        self.layers = nn.ModuleList(DraftLayer(config, i, convention, dtype, device) for i in range(num_layers))
        self.embed_tokens = Embedding(vocab, size, dtype, device) if own_embedding else target.embed_tokens
        self.heads = nn.ModuleList(
            Head(size, vocab, dtype, device) if i in own_heads else target.lm_head for i in range(num_layers)
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
