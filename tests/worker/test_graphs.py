"""Captured steps on a CPU: a "graph" that runs its step again and fills the result of the first time."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Repeating, Result, Row
from tiny import write_checkpoint

from specgen.engine.step import ScheduledRow, SchedulerOutput
from specgen.models.context import AttentionContext
from specgen.sampling_params import SamplingParams
from specgen.worker import forward_graphs, graphs
from specgen.worker.forward_graphs import token_counts
from specgen.worker.graphs import batch_sizes, rounded_seq_len
from specgen.worker.processor_needs import ProcessorNeeds

ROWS = 24
LENGTHS = (18, 20, 37, 60, 19, 40, 50, 17, 33)  # of prompts


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in _tensors(part)]


class Again:
    """Stands for a captured graph."""

    def __init__(self, run: Callable[[], Any], result: Any) -> None:
        self._run, self._result = run, result
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for old, new in zip(_tensors(self._result), _tensors(self._run()), strict=True):
            old.copy_(new)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """What was captured since."""
    all_graphs: list[Again] = []

    def capture(run: Callable[[], Any], memory: object) -> tuple[Again, Any]:
        result = run()
        all_graphs.append(Again(run, result))
        return all_graphs[-1], result

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(forward_graphs, "capture", capture)
    monkeypatch.setattr(forward_graphs, "run_once", lambda run, memory: run())
    monkeypatch.setattr("specgen.worker.model_runner.GraphMemory", lambda num_bytes: object())
    return all_graphs


def make_rows() -> list[Row]:
    rng = random.Random(0)
    return [
        Row(
            [rng.randrange(2, 60) for _ in range(rng.randint(3, 40))],
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 10]),
                presence_penalty=rng.choice([0.0, 0.5]),
                max_tokens=rng.randint(3, 20),
            ),
            seed=i,
        )
        for i in range(ROWS)
    ]


def ids(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("k", [0, 2])
def test_captured_steps_of_padded_rows_and_tokens_change_nothing(k: int, tmp_path: Path, captured: list[Again]) -> None:
    folder = write_checkpoint(tmp_path)
    rows = make_rows()
    alone = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False)
    want = ids([alone.run([row])[0] for row in rows])
    harness = Harness(folder, k=k, max_num_seqs=7, budget=48)
    runner = harness.worker.runner
    runner.use_graphs(7, 48, 0)
    assert runner.graphs is not None and runner.forward_graphs is not None
    assert ids(harness.run(rows)) == want
    assert runner.graphs.num_captured >= 2 and runner.forward_graphs.num_captured >= 1
    assert len(captured) == runner.graphs.num_captured + runner.forward_graphs.num_captured
    assert sum(graph.num_replays for graph in captured) > 2 * len(captured)


def test_prompts_run_with_the_tokens_of_a_graph_and_long_ones_without_one(
    tmp_path: Path, captured: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_graphs, "_SMALLEST", 16)
    monkeypatch.setattr(forward_graphs, "LONG_STEP", 32)
    monkeypatch.setattr(forward_graphs, "_GRAIN", 8)
    folder = write_checkpoint(tmp_path)
    rows = [Row([2 + i, *range(3, 2 + length)], SamplingParams(max_tokens=1)) for i, length in enumerate(LENGTHS)]
    want = ids([Harness(folder, k=0, max_num_seqs=1, prefix_caching=False).run([row])[0] for row in rows])
    harness = Harness(folder, k=2, max_num_seqs=2, budget=64, prefix_caching=False)
    runner = harness.worker.runner
    runner.use_graphs(2, 64, 0)
    seen: list[int] = []
    forward = runner.target.forward

    def note(input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(input_ids))
        return forward(input_ids, *args)

    runner.target.forward = note
    assert ids([harness.run([row])[0] for row in rows]) == want
    # the ladder is 16, 20, 24, 28, 32; here a capture runs its step once, and each replay runs it again
    assert seen == [20, 20, 20, 40, 64, 20, 40, 56, 20, 40]
    assert [graph.num_replays for graph in captured] == [4]


def test_a_size_gets_a_graph_when_it_has_none_near_it_or_is_asked_for_often_enough(
    tmp_path: Path, captured: list[Again]
) -> None:
    harness = Harness(write_checkpoint(tmp_path), k=0, max_num_seqs=16)
    harness.worker.runner.use_graphs(16, 48, 0)
    decode = harness.worker.runner.graphs
    assert decode is not None and batch_sizes(16) == [1, 2, 4, 8, 10, 12, 14, 16]
    greedy = ProcessorNeeds(False, False, noise=False)

    def graph_size(num_rows: int, needs: ProcessorNeeds = greedy, times: int = 1) -> int:
        rows = [ScheduledRow(i, i, 1, 0, True, [], 0, 0, 9) for i in range(num_rows)]
        ready = decode.ready(SchedulerOutput(rows=rows, times=times), 0, needs)
        assert len(ready.tokens.packed) == num_rows
        return next(g.inputs.shape[1] for g in decode._graphs.values() if g.graph is ready.graph)

    assert graph_size(16) == 16
    # 6 rows more than 10 each time: with the 27th they come to 16 steps of 10; other sizes in between change nothing
    assert [size for _ in range(28) for size in (graph_size(9), graph_size(16))][::2] == [16] * 27 + [10]
    assert [graph_size(n) for n in (11, 13, 12, 14)] == [16] * 4
    assert graph_size(5) == 10, "the smallest there is"
    assert graph_size(4) == 4, "10 is more than twice as many"
    assert graph_size(3) == graph_size(2) == 4
    assert graph_size(9, needs=greedy._replace(noise=True)) == 10, "the graph for 16 lacks what these rows need"
    assert len(captured) == decode.num_captured == 4
    # 12 rows were two steps; 16 steps of them are 48 of 4 rows more, whichever way they come
    assert graph_size(12, times=45) == 16 and graph_size(11) == 16
    assert graph_size(11) == 12


def test_what_is_measured_has_a_graph_of_its_own_size_from_the_first(tmp_path: Path, captured: list[Again]) -> None:
    rows = make_rows()
    folder = write_checkpoint(tmp_path)
    sizes = {}
    for pads in (True, False):
        harness = Harness(folder, k=0, max_num_seqs=7, budget=48)
        harness.worker.runner.use_graphs(7, 48, 0, pads)
        harness.run(rows)
        assert harness.worker.runner.graphs is not None
        sizes[pads] = {kind.size for kind in harness.worker.runner.graphs._graphs}
    assert sizes[True] < sizes[False] == {1, 2, 4, 7}


@pytest.mark.parametrize("k", [0, 2])
def test_a_step_is_within_the_bounds_that_it_is_launched_with(
    k: int, tmp_path: Path, captured: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are sizes of grids and of work space; a CPU's kernels don't need them."""
    monkeypatch.setattr(graphs, "_SHORTEST", 16)
    monkeypatch.setattr(forward_graphs, "_SMALLEST", 16)
    monkeypatch.setattr(forward_graphs, "LONG_STEP", 32)
    monkeypatch.setattr(forward_graphs, "_GRAIN", 8)
    repeating = Repeating(5, random.Random(k))
    harness = Harness(
        write_checkpoint(tmp_path), k=k, max_num_seqs=7, budget=64, async_scheduling=True, repeat_limit=repeating
    )
    runner = harness.worker.runner
    runner.use_graphs(7, 64, 0)
    harness.worker.execute_model = runner.execute_model  # type: ignore[method-assign]
    forward = runner.target.forward
    bounds: set[int] = set()

    def check(input_ids: torch.Tensor, context: AttentionContext, *args: Any) -> torch.Tensor:
        lengths = context.query_start_loc.diff()
        assert int(context.seq_lens.max()) <= context.max_seq_len
        assert int(lengths.max()) <= context.max_query_len and int(lengths.min()) >= 0
        if len(lengths) != len(input_ids) // (k + 1):  # with parts of prompts
            num_tokens = int(context.query_start_loc[-1])
            assert torch.all(context.idx_mapping[lengths == 0] == -1), "a row without tokens is nobody's"
            assert num_tokens <= len(input_ids) < num_tokens + 16, "padded to 16, 20, 24, 28, 32 or a multiple of 8"
            assert torch.all(context.slot_mapping[num_tokens:] == -1), "a padded token writes nothing"
        bounds.add(context.max_seq_len)
        return forward(input_ids, context, *args)

    runner.target.forward = check
    harness.run(make_rows())
    assert len(bounds) > 1 and any(graph.num_replays for graph in captured)


@pytest.mark.parametrize("k", [0, 2])
def test_captured_steps_that_run_several_times(k: int, tmp_path: Path, captured: list[Again]) -> None:
    folder = write_checkpoint(tmp_path)
    rows = make_rows()
    want = ids(Harness(folder, k=0, max_num_seqs=7).run(rows))
    repeating = Repeating(5, random.Random(k))
    harness = Harness(folder, k=k, max_num_seqs=7, budget=48, async_scheduling=True, repeat_limit=repeating)
    runner = harness.worker.runner
    runner.use_graphs(7, 48, 0)
    seen: list[int] = []
    runner.on_step = seen.append
    harness.worker.execute_model = runner.execute_model  # type: ignore[method-assign]
    assert ids(harness.run(rows)) == want
    assert len(seen) == harness.core.num_steps
    assert any(times > 1 for times in (graph.num_replays for graph in captured))


def test_steps_that_only_compile_are_of_every_kind_and_nobodys(
    tmp_path: Path, captured: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_SHORTEST", 32)
    folder = write_checkpoint(tmp_path)
    rows = make_rows()
    want = ids(Harness(folder, k=2, max_num_seqs=7).run(rows))
    harness = Harness(folder, k=2, max_num_seqs=7)
    runner = harness.worker.runner
    seen: list[tuple[int, int]] = []
    forward = runner.target.forward

    def note(input_ids: torch.Tensor, context: AttentionContext, *args: Any) -> torch.Tensor:
        seen.append((len(input_ids), context.max_seq_len))
        return forward(input_ids, context, *args)

    runner.target.forward = note
    pool = harness.worker.kv_caches  # the draft layers' as well
    before = pool.clone()
    runner.run_all_kinds(7, 600)
    longest = seen[-1][1]
    assert longest > 32 and not captured
    assert seen[:3] == [(600, 32), (512, 32), (256, 32)]
    assert seen[3:11] == [(3 * size, bound) for bound in (32, longest) for size in (1, 2, 4, 7)]
    assert seen[11:] == [(21, longest)], "the largest, greedy"
    assert torch.equal(pool[:, 1:], before[:, 1:]), "of nobody nothing is written"
    assert ids(harness.run(rows)) == want


def test_ladders() -> None:
    assert (
        batch_sizes(1) == [1] and batch_sizes(7) == [1, 2, 4, 7] and batch_sizes(20) == [1, 2, 4, 8, 10, 12, 14, 16, 20]
    )
    assert token_counts(48) == [48] and token_counts(256) == [256]
    assert token_counts(1000) == [256, 320, 384, 448, 512, 640, 768, 896, 1000]
    counts = token_counts(16384)
    assert counts[-1] == 4096 and counts == sorted(set(counts)) and len(counts) == 25
    assert all(b <= 1.25 * a for a, b in pairwise(counts)), "little padding"
    assert all(b <= 1.125 * a for a, b in pairwise(counts) if a >= 1024)
    for most in (5, 64, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
        assert all(4 * b <= 5 * a + 3 for a, b in pairwise(sizes) if a >= 8), "little padding"
    assert [rounded_seq_len(n, 5000) for n in (1, 1024, 1025, 4097)] == [1024, 1024, 2048, 5000]
