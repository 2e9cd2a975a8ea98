"""A step's flat tensors: the one place where they are built.

The host contributes what it decided (who, how many tokens, which rows need logits); positions, ids and slots come from
the device's own counts, since with asynchronous scheduling the host does not know how many drafts were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from specgen.engine.step import ScheduledRow
from specgen.kernels.prepare_inputs import prepare_inputs
from specgen.kernels.rejection import live_slots
from specgen.models.context import AttentionContext
from specgen.worker.processor_needs import ProcessorNeeds
from specgen.worker.states import RequestStates, to_device


class InputBatch(NamedTuple):
    """One step on the device.

    idx_mapping `[B] int32`, query_start_loc and cu_num_logits `[B+1] int32`; input_ids and positions `[T] int64`;
    logits_indices `[N] int64`, None if every token has logits; row_slots, spec_start and spec_count `[N] int32`
    (request slot of each logits row; which of the logits rows' input ids are drafts before it); `needs`: the
    processors that some row uses.
    """

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    input_ids: torch.Tensor
    context: AttentionContext
    logits_indices: torch.Tensor | None
    row_slots: torch.Tensor
    spec_start: torch.Tensor
    spec_count: torch.Tensor
    needs: ProcessorNeeds

    @property
    def positions(self) -> torch.Tensor:
        """`[T] int64`, the absolute position of each input token."""
        return self.context.positions

    def at_logits(self, values: torch.Tensor) -> torch.Tensor:
        """What `values [T, ...]` are for the logits rows, `[N, ...]`."""
        return values if self.logits_indices is None else values[self.logits_indices]


class HostBatch(NamedTuple):
    """The host's part of a step, as arrays named like those of `InputBatch`."""

    idx_mapping: np.ndarray
    query_start_loc: np.ndarray
    cu_num_logits: np.ndarray
    logits_indices: np.ndarray
    row_slots: np.ndarray
    spec_start: np.ndarray
    spec_count: np.ndarray
    max_query_len: int


def host_batch(rows: list[ScheduledRow]) -> HostBatch:
    """Lays the rows of a step side by side; each has one logits row more than drafts, at the end of its tokens."""
    slots = np.fromiter((row.slot for row in rows), np.int32, len(rows))
    num_tokens = np.fromiter((row.num_tokens for row in rows), np.int32, len(rows))
    num_logits = np.fromiter((row.num_draft_tokens + 1 for row in rows), np.int32, len(rows))
    query_start_loc = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
    cu_num_logits = np.concatenate([[0], np.cumsum(num_logits)]).astype(np.int32)
    local = (np.arange(cu_num_logits[-1]) - np.repeat(cu_num_logits[:-1], num_logits)).astype(np.int32)
    first = np.repeat(query_start_loc[1:] - num_logits, num_logits)
    return HostBatch(
        idx_mapping=slots,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        logits_indices=first + local,
        row_slots=np.repeat(slots, num_logits),
        spec_start=np.repeat(cu_num_logits[:-1], num_logits) + np.int32(1),
        spec_count=local,
        max_query_len=int(num_tokens.max()),
    )


def build_batch(
    rows: list[ScheduledRow],
    states: RequestStates,
    max_seq_len: int,
    block_size: int,
    needs: ProcessorNeeds,
    rewinds: bool,
) -> InputBatch:
    """The step's tensors; one copy to the device. `max_seq_len` bounds any row's tokens after the step, drafts too.

    A row that ended in a step before this one, which the host did not know yet, is a padded row.

    `rewinds`: whether rows may recompute positions behind a prefix hit, which must not be written again.
    """
    host = host_batch(rows)
    parts = (
        host.idx_mapping,
        host.query_start_loc,
        host.cu_num_logits,
        host.logits_indices,
        host.row_slots,
        host.spec_start,
        host.spec_count,
    )
    flat = to_device(np.concatenate(parts).astype(np.int32), states.device)
    idx_mapping, query_start_loc, cu_num_logits, logits_indices, row_slots, spec_start, spec_count = flat.split(
        [len(part) for part in parts]
    )
    idx_mapping, row_slots = live_slots(idx_mapping, states.finished), live_slots(row_slots, states.finished)
    num_tokens = int(host.query_start_loc[-1])
    inputs = prepare_inputs(
        idx_mapping,
        query_start_loc,
        num_tokens,
        token_ids=states.token_ids,
        total_len=states.total_len,
        num_computed_tokens=states.num_computed_tokens,
        draft_tokens=states.draft_tokens,
        block_tables=states.block_tables,
        block_size=block_size,
    )
    slot_mapping = inputs.slot_mapping
    if rewinds:
        lengths = query_start_loc.diff()
        token_slots = torch.repeat_interleave(idx_mapping, lengths, output_size=num_tokens)
        slot_mapping = torch.where(inputs.positions < states.kv_start[token_slots], -1, slot_mapping)
    context = AttentionContext(
        positions=inputs.positions,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=inputs.seq_lens,
        idx_mapping=idx_mapping,
        block_tables=states.block_tables,
        max_query_len=host.max_query_len,
        max_seq_len=max_seq_len,
    )
    return InputBatch(
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        input_ids=inputs.input_ids,
        context=context,
        logits_indices=logits_indices.long(),
        row_slots=row_slots,
        spec_start=spec_start,
        spec_count=spec_count,
        needs=needs,
    )
