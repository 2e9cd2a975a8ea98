"""What a forward pass knows about its step besides the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionContext(NamedTuple):
    """Where each token's KV goes and what each query sees.

    positions, slot_mapping `[T] int64`; query_start_loc `[B+1] int32`; seq_lens, idx_mapping `[B] int32`; block_tables
    `[R, max_blocks] int32`; max_query_len and max_seq_len are upper bounds known to the host.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    idx_mapping: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_seq_len: int
