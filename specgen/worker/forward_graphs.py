"""The target's forward as a CUDA graph, for steps that hold parts of prompts: hundreds of launches become one.

Such a step has any number of tokens and rows. Tokens are padded to a ladder of counts, rows to the most there can be:
padded tokens belong to no row and write no KV; what comes of them is cut off. They are computed all the same, so that
the ladder is narrow, and long steps run without a graph, at nearly their own size. Graphs are captured when a count is
first used. What follows the target runs without a graph in any case, while the device is busy with the target.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from specgen.engine.step import LONG_STEP
from specgen.models.context import AttentionContext
from specgen.worker.graphs import GraphMemory, capture, rounded_seq_len, run_once

logger = logging.getLogger(__name__)

_SMALLEST = 256  # tokens
# What the tokens of a long step are padded to a multiple of: kernels are compiled for multiples of 16 before the first
# step, and products come in tiles of 128.
_GRAIN = 128

Forward = Callable[[torch.Tensor, AttentionContext], torch.Tensor]


def token_counts(max_num_tokens: int) -> list[int]:
    """The ladder: 256, then steps of a quarter, from 1,024 on of an eighth, up to `max_num_tokens` or a long step."""
    counts: list[int] = []
    size, most = _SMALLEST, min(max_num_tokens, LONG_STEP)
    while size < most:
        counts += range(size, 2 * size, size // (4 if size < 1024 else 8))
        size *= 2
    return [*(count for count in counts if count < most), most]


class _Inputs(NamedTuple):
    """What forwards read, at first a step of padding."""

    input_ids: torch.Tensor
    context: AttentionContext

    def first(self, num_tokens: int, max_seq_len: int) -> _Inputs:
        """Of the first tokens only, none of whose rows is longer."""
        context = self.context._replace(
            positions=self.context.positions[:num_tokens],
            slot_mapping=self.context.slot_mapping[:num_tokens],
            max_query_len=num_tokens,
            max_seq_len=max_seq_len,
        )
        return _Inputs(self.input_ids[:num_tokens], context)

    def fill(self, input_ids: torch.Tensor, context: AttentionContext) -> None:
        """Puts a step in, of at most as many tokens and rows, behind which is padding."""
        num_tokens, num_rows, own = len(input_ids), len(context.idx_mapping), self.context
        self.input_ids[:num_tokens] = input_ids
        own.positions[:num_tokens] = context.positions
        own.slot_mapping[:num_tokens] = context.slot_mapping
        own.slot_mapping[num_tokens:] = -1
        own.query_start_loc[: num_rows + 1] = context.query_start_loc
        own.query_start_loc[num_rows + 1 :] = num_tokens
        own.seq_lens[:num_rows] = context.seq_lens
        own.idx_mapping[:num_rows] = context.idx_mapping
        own.idx_mapping[num_rows:] = -1


class _Kind(NamedTuple):
    """Forwards that one graph serves: so many tokens, no row longer."""

    num_tokens: int
    max_seq_len: int


class ForwardGraphs:
    """The forwards of one target, captured unless they are long. `forward(input_ids, context)` gives `[T, H]`."""

    def __init__(
        self, forward: Forward, max_num_seqs: int, max_num_tokens: int, max_seq_len: int, memory: GraphMemory | None
    ) -> None:
        """The most rows, tokens a step and tokens a row; `memory` may be shared with other graphs; without, nothing can
        be captured."""
        self._forward = forward
        self._counts = token_counts(max_num_tokens)
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._max_seq_len = max_seq_len
        self._memory = memory
        self._inputs: _Inputs | None = None  # of the most tokens and rows; all forwards read the first of them
        self._hidden: torch.Tensor | None = None  # what all forwards give, `[max_num_tokens, H]`
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self.capture_seconds = 0.0

    @property
    def num_captured(self) -> int:
        """Graphs so far, which took `capture_seconds`."""
        return len(self._graphs)

    def run(self, input_ids: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Hidden states `[T, H]` of a step of at most the most tokens and rows; valid until the next call."""
        num_tokens = len(input_ids)
        kind = _Kind(self._padded(num_tokens), rounded_seq_len(context.max_seq_len, self._max_seq_len))
        if self._inputs is None:
            self._inputs = self._padding(self._max_num_tokens, context.block_tables)
        inputs = self._inputs.first(*kind)
        inputs.fill(input_ids, context)
        assert self._memory is not None
        if num_tokens > self._counts[-1]:
            run_once(partial(self._run, inputs), self._memory)
        else:
            if kind not in self._graphs:
                self._graphs[kind] = self._capture(inputs)
            self._graphs[kind].replay()
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def steps_of_all_kinds(self, block_tables: torch.Tensor) -> Iterator[Callable[[], object]]:
        """Steps of the most tokens and of all powers of two below, for rows of the shortest bound."""
        inputs = self._padding(self._max_num_tokens, block_tables)
        count = self._max_num_tokens
        while count >= min(_SMALLEST, self._max_num_tokens):
            yield partial(self._forward, *inputs.first(count, rounded_seq_len(1, self._max_seq_len)))
            count = 1 << ((count - 1).bit_length() - 1)

    def _padded(self, num_tokens: int) -> int:
        """The tokens that a step of so many runs with."""
        if num_tokens > self._counts[-1]:
            return min(self._max_num_tokens, -(-num_tokens // _GRAIN) * _GRAIN)
        return next(count for count in self._counts if count >= num_tokens)

    def _run(self, inputs: _Inputs) -> None:
        hidden = self._forward(*inputs)
        if self._hidden is None:
            self._hidden = hidden.new_empty(self._max_num_tokens, hidden.shape[1])
        self._hidden[: len(hidden)].copy_(hidden)

    def _capture(self, inputs: _Inputs) -> torch.cuda.CUDAGraph:
        start = time.perf_counter()
        assert self._memory is not None
        graph, _ = capture(partial(self._run, inputs), self._memory)
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        logger.debug("captured a forward of %d tokens in %.2f s", len(inputs.input_ids), seconds)
        return graph

    def _padding(self, num_tokens: int, block_tables: torch.Tensor) -> _Inputs:
        device, num_rows = block_tables.device, self._max_num_seqs
        context = AttentionContext(
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            query_start_loc=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            idx_mapping=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            block_tables=block_tables,
            max_query_len=num_tokens,
            max_seq_len=self._max_seq_len,
        )
        return _Inputs(torch.zeros(num_tokens, dtype=torch.int64, device=device), context)
