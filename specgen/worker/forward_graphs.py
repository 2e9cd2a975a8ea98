"""The target's forward as a CUDA graph, for steps that hold parts of prompts: hundreds of launches become one.

Such a step has any number of tokens and rows. Tokens are padded to a ladder of counts, rows to the most there can be:
padded tokens belong to no row and write no KV; what comes of them is cut off. Graphs are captured when a count is first
used. What follows the target runs without a graph, while the device is busy with this one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from specgen.models.context import AttentionContext
from specgen.worker.graphs import GraphMemory, capture, rounded_seq_len

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, AttentionContext], torch.Tensor]


def token_counts(max_num_tokens: int) -> list[int]:
    """The ladder: 256, then steps of a third or a half, up to `max_num_tokens`."""
    counts, size = [], 256
    while size < max_num_tokens:
        counts += [size, size * 3 // 2]
        size *= 2
    return [*(count for count in counts if count < max_num_tokens), max_num_tokens]


class _Inputs(NamedTuple):
    """What a captured forward reads, at first a step of padding."""

    input_ids: torch.Tensor
    context: AttentionContext


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    hidden: torch.Tensor


class ForwardGraphs:
    """The captured forwards of one target. `forward(input_ids, context)` gives hidden states `[T, H]`."""

    def __init__(
        self, forward: Forward, max_num_seqs: int, max_num_tokens: int, max_seq_len: int, memory: GraphMemory | None
    ) -> None:
        """The most rows, tokens a step and tokens a row; `memory` may be shared with other graphs; without, nothing can
        be captured."""
        self._forward = forward
        self._counts = token_counts(max_num_tokens)
        self._max_num_seqs = max_num_seqs
        self._max_seq_len = max_seq_len
        self._memory = memory
        self._hidden: torch.Tensor | None = None  # what every graph gives, `[max_num_tokens, H]`
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.capture_seconds = 0.0

    @property
    def num_captured(self) -> int:
        """Graphs so far, which took `capture_seconds`."""
        return len(self._graphs)

    def run(self, input_ids: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Hidden states `[T, H]` of a step of at most the most tokens and rows; valid until the next call."""
        num_tokens, num_rows = len(input_ids), len(context.idx_mapping)
        count = next(count for count in self._counts if count >= num_tokens)
        key = (count, rounded_seq_len(context.max_seq_len, self._max_seq_len))
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key, context.block_tables)
        captured = self._graphs[key]
        inputs = captured.inputs.context
        captured.inputs.input_ids[:num_tokens] = input_ids
        inputs.positions[:num_tokens] = context.positions
        inputs.slot_mapping[:num_tokens] = context.slot_mapping
        inputs.slot_mapping[num_tokens:] = -1
        inputs.query_start_loc[: num_rows + 1] = context.query_start_loc
        inputs.query_start_loc[num_rows + 1 :] = num_tokens
        inputs.seq_lens[:num_rows] = context.seq_lens
        inputs.idx_mapping[:num_rows] = context.idx_mapping
        inputs.idx_mapping[num_rows:] = -1
        captured.graph.replay()
        return captured.hidden[:num_tokens]

    def steps_of_all_counts(self, block_tables: torch.Tensor) -> Iterator[Callable[[], object]]:
        """The steps that are captured, from the largest down, for rows of the shortest bound."""
        for count in reversed(self._counts):
            inputs = self._padding(count, rounded_seq_len(1, self._max_seq_len), block_tables)
            yield partial(self._forward, *inputs)

    def _capture(self, num_tokens: int, max_seq_len: int, block_tables: torch.Tensor) -> _Graph:
        start = time.perf_counter()
        inputs = self._padding(num_tokens, max_seq_len, block_tables)

        def run() -> torch.Tensor:
            hidden = self._forward(*inputs)
            if self._hidden is None:
                self._hidden = hidden.new_empty(self._counts[-1], hidden.shape[1])
            return self._hidden[:num_tokens].copy_(hidden)

        assert self._memory is not None
        graph, hidden = capture(run, self._memory)
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        logger.debug("captured a forward of %d tokens in %.2f s", num_tokens, seconds)
        return _Graph(graph, inputs, hidden)

    def _padding(self, num_tokens: int, max_seq_len: int, block_tables: torch.Tensor) -> _Inputs:
        device, num_rows = block_tables.device, self._max_num_seqs
        context = AttentionContext(
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            query_start_loc=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            idx_mapping=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            block_tables=block_tables,
            max_query_len=num_tokens,
            max_seq_len=max_seq_len,
        )
        return _Inputs(torch.zeros(num_tokens, dtype=torch.int64, device=device), context)
