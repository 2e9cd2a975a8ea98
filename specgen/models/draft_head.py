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

from specgen.models.dense import GQAAttention, rotary_table
from specgen.models.dense_config import DenseConfig
from specgen.models.mtp import DraftLayers, MTPLayer


class HeadConvention(NamedTuple):
    """What a head was trained with, and its tensors don't tell."""

    hidden_first: bool
    mask_first_embedding: bool = True


class DraftLayer(MTPLayer):
    """An MTP layer over key heads, trained with a convention of its own."""

    def __init__(
        self, config: DenseConfig, index: int, convention: HeadConvention, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, index, GQAAttention(config, dtype, device), dtype, device)
        self.hidden_first, self.mask_first_embedding = convention


class DraftHead(DraftLayers):
    """Draft layers of one convention, with a rotary table of their own."""

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
        layers: list[MTPLayer] = [DraftLayer(config, i, convention, dtype, device) for i in range(num_layers)]
        super().__init__(target, config, layers, own_embedding, own_heads, dtype, device)
        self.register_buffer("cos_sin", rotary_table(config, max_positions, device), persistent=False)
