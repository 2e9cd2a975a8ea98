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


class OutputRows(NamedTuple):
    """Which tokens of a step give an output: of the others a layer writes the KV and computes nothing else.

    rows `[N] int64`, in the step; context: of these alone, one query a request, slots -1 (their KV is the step's).
    """

    rows: torch.Tensor
    context: AttentionContext

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """What `values [T, ...]` are for the rows, `[N, ...]`; without rows nothing is launched for it."""
        return values.index_select(0, self.rows) if len(self.rows) else values[:0]


def reads_first_outputs(num_layers: int, num_drafts: int) -> bool:
    """Whether so many drafts need what the last of so many draft layers makes of a step's own tokens, beside its KV.

    Draft pass `num_layers` begins with it; with one layer it gives the first draft, too.
    """
    return num_drafts > (num_layers if num_layers > 1 else 0)
