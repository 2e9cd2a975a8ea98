"""A target's logits at every position of one sequence, without the engine."""

from __future__ import annotations

from typing import Any

import torch

from specgen.models.context import AttentionContext


def whole_sequence_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of every position of one sequence, over a pool whose blocks are in no order."""
    block_size, num = 4, len(ids)
    num_blocks = -(-num // block_size)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32) + 1
    config = model.config
    kv = torch.full((config.num_hidden_layers, num_blocks + 1, block_size, config.kv_width), float("nan"))
    positions = torch.arange(num)
    context = AttentionContext(
        positions=positions,
        slot_mapping=order[positions // block_size].long() * block_size + positions % block_size,
        query_start_loc=torch.tensor([0, num], dtype=torch.int32),
        seq_lens=torch.tensor([num], dtype=torch.int32),
        idx_mapping=torch.tensor([0], dtype=torch.int32),
        block_tables=order[None],
        max_query_len=num,
        max_seq_len=num,
    )
    with torch.inference_mode():
        return model.compute_logits(model(torch.tensor(ids), context, kv))
