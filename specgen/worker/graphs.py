"""Decode steps as one CUDA graph launch each, from input preparation to the next drafts.

A step fits a graph when every row feeds its last token and drafts. Rows are padded to a ladder of batch sizes with slot
-1, which every kernel skips; each row to the same number of drafts, K, with -1, which is never accepted. The graph's
only inputs are which slot each row is and how many drafts count; everything else is on the device already. Graphs are
captured for a size, its K, the processors that its rows need and the length of the longest, when it is first used; or,
if there is one for up to twice as many rows, when the steps padded to that have cost as much as a capture.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from specgen.engine.step import SchedulerOutput
from specgen.kernels.logprobs import Logprobs
from specgen.kernels.prepare_inputs import prepare_inputs
from specgen.kernels.rejection import live_slots
from specgen.models.context import AttentionContext
from specgen.worker.input_batch import InputBatch
from specgen.worker.processor_needs import ProcessorNeeds
from specgen.worker.states import RequestStates, to_device

logger = logging.getLogger(__name__)

_MOST_PADDED = 2  # times as many rows that a step may run with, before one of its own size is captured
_CAPTURE_STEPS = 16  # steps that take about as long as a capture
_SHORTEST = 1024  # tokens; graphs differ in the longest sequence they can hold, by powers of two from here

Result = TypeVar("Result")


class StepTokens(NamedTuple):
    """What a step gives: `packed [B, most drafts + 2] int64`, see `pack_tokens`; if any row wants log-probabilities,
    the token `[N] int64` of each logits row with them."""

    packed: torch.Tensor
    judged: tuple[torch.Tensor, Logprobs] | None = None

    def first(self, num_rows: int, num_drafts: int) -> StepTokens:
        """Of the first rows only, all of which have so many drafts and one logits row more."""
        judged, num_logits = self.judged, num_rows * (num_drafts + 1)
        if judged is not None:
            judged = judged[0][:num_logits], Logprobs(*(tensor[:num_logits] for tensor in judged[1]))
        return StepTokens(self.packed[:num_rows], judged)


RunStep = Callable[[InputBatch, int], StepTokens]


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The ladder: 1, 2, 4, then steps of about a quarter, up to `max_num_seqs`."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 3)) if size > 4 else size
    return [*sizes, max_num_seqs]


def rounded_seq_len(longest: int, limit: int) -> int:
    """The bound of sequence lengths that a graph is captured for: a power of two, at most `limit`."""
    return min(limit, max(_SHORTEST, 1 << (longest - 1).bit_length()))


class GraphMemory:
    """What captured steps, and long ones, work in: one stream and its memory.

    They run one after the other, so that all of them share the memory of the largest; only results stay apart.
    """

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` are taken at once, in one piece, so that what is captured first leaves no holes."""
        self.pool = torch.cuda.MemPool()
        self.stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """A graph to capture in this memory."""
        self._graphs.append(torch.cuda.CUDAGraph())
        return self._graphs[-1]

    def __del__(self) -> None:
        """No graph outlives its memory, in whatever order a cycle is collected."""
        for graph in self._graphs:
            graph.reset()


def run_once(run: Callable[[], object], memory: GraphMemory) -> None:
    """Runs without a graph in the graphs' memory; what is made there and stays is valid until the next graph runs."""
    memory.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(memory.stream), torch.cuda.use_mem_pool(memory.pool):
        run()
    torch.cuda.current_stream().wait_stream(memory.stream)


def capture(run: Callable[[], Result], memory: GraphMemory) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `run`, and the result that its replays fill. `run` goes once before, for kernels to be compiled."""
    run_once(run, memory)
    graph = memory.new_graph()
    pool: Any = memory.pool.id
    with torch.cuda.graph(graph, pool=pool, stream=memory.stream, capture_error_mode="thread_local"):
        result = run()
    return graph, result


class _Layout(NamedTuple):
    """What every step of so many rows with K + 1 tokens each has in common, `int32`.

    bounds `[B + 1]`: where rows begin; local and spec_start `[B (K + 1)]`: a token's place in its row, and the place of
    the row's first draft.
    """

    bounds: torch.Tensor
    local: torch.Tensor
    spec_start: torch.Tensor


class _Kind(NamedTuple):
    """Decode steps that one graph serves: so many rows with so many drafts, none longer, that need no more."""

    size: int
    num_drafts: int
    max_seq_len: int
    needs: ProcessorNeeds


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    layout: _Layout  # the graph reads it
    tokens: StepTokens


class ReadyGraph(NamedTuple):
    """A captured step with its inputs in place, until the next step is made ready."""

    graph: torch.cuda.CUDAGraph
    tokens: StepTokens

    def run(self) -> None:
        """Launches the step. What it gives is in `tokens` until the next launch."""
        self.graph.replay()


class DecodeGraphs:
    """The captured steps of one runner. `run_step(batch, K)` is the whole step after its inputs are prepared."""

    def __init__(
        self,
        run_step: RunStep,
        states: RequestStates,
        max_num_seqs: int,
        block_size: int,
        memory: GraphMemory | None,
        pads: bool = True,
    ) -> None:
        """`block_size` in tokens; `memory` may be shared with other graphs; without, nothing can be captured.

        `pads`: a few steps of a size run with more rows; else each size is captured when it is first used.
        """
        self._run_step = run_step
        self._states = states
        self._sizes = batch_sizes(max_num_seqs)
        self._block_size = block_size
        self._max_seq_len = states.block_tables.shape[1] * block_size
        self._graphs: dict[_Kind, _Graph] = {}
        self._memory = memory
        self._most_padded = _MOST_PADDED if pads else 1
        self._padded_rows: Counter[_Kind] = Counter()  # in all steps of a kind that has no graph
        self.capture_seconds = 0.0

    @property
    def num_captured(self) -> int:
        """Graphs so far, which took `capture_seconds`."""
        return len(self._graphs)

    def ready(self, step: SchedulerOutput, num_drafts: int, needs: ProcessorNeeds) -> ReadyGraph:
        """`step`, all of whose rows only decode, with room for so many drafts a row before and after it."""
        rows = step.rows
        size = next(s for s in self._sizes if s >= len(rows))
        max_seq_len = rounded_seq_len(step.max_computed_after + num_drafts, self._max_seq_len)
        captured = self._captured(_Kind(size, num_drafts, max_seq_len, needs), step.times)
        inputs = np.full(captured.inputs.shape, -1, dtype=np.int32)
        inputs[0, : len(rows)] = [row.slot for row in rows]
        inputs[1, : len(rows)] = [row.num_draft_tokens for row in rows]
        captured.inputs.copy_(to_device(inputs, self._states.device))
        return ReadyGraph(captured.graph, captured.tokens.first(len(rows), num_drafts))

    def _captured(self, kind: _Kind, times: int) -> _Graph:
        """The graph for a step that runs so many times; while few have been of its kind, one of more rows if there is.

        At a run's end, where rows become fewer with every step, a graph for each size would be used a few times.
        """
        if kind in self._graphs:
            return self._graphs[kind]
        more = (kind._replace(size=s) for s in self._sizes if kind.size < s <= self._most_padded * kind.size)
        larger = next((other for other in more if other in self._graphs), None)
        if larger is not None and self._padded_rows[kind] < _CAPTURE_STEPS * kind.size:
            self._padded_rows[kind] += times * (larger.size - kind.size)
            return self._graphs[larger]
        self._graphs[kind] = self._capture(*kind)
        return self._graphs[kind]

    def run_largest(self, num_drafts: int, needs: ProcessorNeeds) -> None:
        """Runs the step that is captured for the most and the longest rows, without capturing it."""
        self._prepare(self._sizes[-1], num_drafts, self._max_seq_len, needs)[0]()

    def steps_of_all_kinds(self, num_drafts: int, needs: ProcessorNeeds) -> Iterator[Callable[[], object]]:
        """Steps that launch what captured ones do, of the sizes that are powers of two, of short and of long rows."""
        for max_seq_len in sorted({rounded_seq_len(1, self._max_seq_len), self._max_seq_len}):
            for size in self._sizes:
                if size & (size - 1) == 0 or size == self._sizes[-1]:
                    yield self._prepare(size, num_drafts, max_seq_len, needs)[0]

    def _capture(self, size: int, num_drafts: int, max_seq_len: int, needs: ProcessorNeeds) -> _Graph:
        start = time.perf_counter()
        run_step, inputs, layout = self._prepare(size, num_drafts, max_seq_len, needs)
        assert self._memory is not None
        graph, tokens = capture(run_step, self._memory)  # padded rows change nothing
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        logger.debug("captured a decode step of %d rows with %d drafts in %.2f s", size, num_drafts, seconds)
        return _Graph(graph, inputs, layout, tokens)

    def _prepare(
        self, size: int, num_drafts: int, max_seq_len: int, needs: ProcessorNeeds
    ) -> tuple[Callable[[], StepTokens], torch.Tensor, _Layout]:
        """A step of so many rows, its inputs (at first nobody's) and its layout, to be kept as long as it may run."""
        inputs = torch.full((2, size), -1, dtype=torch.int32, device=self._states.device)
        layout = self._layout(size, num_drafts + 1)

        def run_step() -> StepTokens:
            return self._run_step(self._uniform_batch(inputs, layout, max_seq_len, needs), num_drafts)

        return run_step, inputs, layout

    def _layout(self, size: int, width: int) -> _Layout:
        device = self._states.device
        bounds = torch.arange(size + 1, dtype=torch.int32, device=device) * width
        local = torch.arange(width, dtype=torch.int32, device=device).repeat(size)
        return _Layout(bounds, local, (bounds[:-1] + 1).repeat_interleave(width))

    def _uniform_batch(
        self, inputs: torch.Tensor, layout: _Layout, max_seq_len: int, needs: ProcessorNeeds
    ) -> InputBatch:
        """K + 1 tokens a row, from device values alone: `inputs[0]` are the rows' slots, `inputs[1]` their drafts."""
        s = self._states
        slots, num_drafts = inputs
        idx_mapping = live_slots(slots, s.finished)  # a row that ended is a padded row
        size = len(idx_mapping)
        width = len(layout.local) // size
        prepared = prepare_inputs(
            idx_mapping,
            layout.bounds,
            size * width,
            token_ids=s.token_ids,
            total_len=s.total_len,
            num_computed_tokens=s.num_computed_tokens,
            draft_tokens=s.draft_tokens,
            block_tables=s.block_tables,
            block_size=self._block_size,
        )
        is_draft = layout.local.view(size, width) <= num_drafts.clamp(min=0).unsqueeze(1)
        input_ids = torch.where(is_draft.flatten(), prepared.input_ids, -1)
        context = AttentionContext(
            positions=prepared.positions,
            slot_mapping=prepared.slot_mapping,
            query_start_loc=layout.bounds,
            seq_lens=prepared.seq_lens,
            idx_mapping=idx_mapping,
            block_tables=s.block_tables,
            max_query_len=width,
            max_seq_len=max_seq_len,
        )
        return InputBatch(
            idx_mapping=idx_mapping,
            query_start_loc=layout.bounds,
            cu_num_logits=layout.bounds,
            input_ids=input_ids,
            context=context,
            logits_indices=None,
            row_slots=idx_mapping.repeat_interleave(width),
            spec_start=layout.spec_start,
            spec_count=layout.local,
            needs=needs,
        )
