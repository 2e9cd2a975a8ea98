"""A row's end is decided on the device, in the step that brings it: the step after it, launched by a host that does not
know yet, does nothing for the row. And nothing is drafted, or kept ready for drafting, that nobody can use.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Result, Row, oracle, reference, run_rows

from specgen.engine.step import SchedulerOutput
from specgen.sampling_params import SamplingParams

VOCAB = 64
FREE = SamplingParams(temperature=0.9, max_tokens=24)


@pytest.fixture(scope="module")
def free(tiny: Path) -> tuple[list[Row], list[Result]]:
    rng = random.Random(11)
    rows = [Row([rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))], FREE, seed=i) for i in range(1, 17)]
    return rows, reference(tiny, rows)


def first_at(tokens: list[int], index: int) -> bool:
    """Whether the token at `index` is met there for the first time."""
    return tokens.index(tokens[index]) == index


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("end", range(1, 10))
def test_an_end_id_among_accepted_drafts_is_counted_as_the_draft_it_is(
    tiny: Path, free: tuple[list[Row], list[Result]], end: int, asynchronous: bool
) -> None:
    """The first step gives a token, each after it three drafts and a bonus: all drafts are right."""
    rows = [
        Row(row.prompt, replace(row.params, stop_token_ids=(whole.token_ids[end],)), row.seed)
        for row, whole in zip(*free, strict=True)
        if first_at(whole.token_ids, end)
    ]
    assert len(rows) > 3
    harness = Harness(tiny, k=3, drafter=oracle(*free), async_scheduling=asynchronous)
    by_seed = {row.seed: whole for row, whole in zip(*free, strict=True)}
    for row, result in zip(rows, harness.run(rows), strict=True):
        assert result.token_ids == by_seed[row.seed].token_ids[: end + 1]
        assert (result.finish_reason, result.stop) == ("stop", result.token_ids[-1])
        steps, place = divmod(end - 1, 4)
        assert result.stats is not None
        assert result.stats.accepted == 3 * steps + min(place + 1, 3)
        assert result.stats.steps == steps + 2
    assert_device_agrees(harness, len(rows))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_caps_at_every_offset(tiny: Path, free: tuple[list[Row], list[Result]], k: int, asynchronous: bool) -> None:
    rows = [Row(row.prompt, replace(row.params, max_tokens=1 + i % 11), row.seed) for i, row in enumerate(free[0])]
    options: dict[str, Any] = {"drafter": oracle(*free)} if k else {}
    harness = Harness(tiny, k=k, async_scheduling=asynchronous, **options)
    for row, result, whole in zip(rows, harness.run(rows), free[1], strict=True):
        assert result.token_ids == whole.token_ids[: row.params.max_tokens]
        assert result.finish_reason == "length"
    assert_device_agrees(harness, len(rows))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_models_own_length_is_a_cap(tiny: Path, free: tuple[list[Row], list[Result]], asynchronous: bool) -> None:
    rows, limit = free[0], 13
    harness = Harness(tiny, k=3, drafter=oracle(*free), async_scheduling=asynchronous, max_model_len=limit)
    for row, result, whole in zip(rows, harness.run(rows), free[1], strict=True):
        assert result.token_ids == whole.token_ids[: limit - len(row.prompt)]
    assert_device_agrees(harness, len(rows))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_least_length_and_ignored_ends_hold_on_the_device(
    tiny: Path, free: tuple[list[Row], list[Result]], asynchronous: bool
) -> None:
    eos = sorted({whole.token_ids[2] for whole in free[1]})[:3]
    kinds = [
        {"min_tokens": 7},
        {"ignore_eos": True},
        {"min_tokens": 7, "stop_token_ids": (eos[0],), "ignore_eos": True},
    ]
    rows = [
        Row(row.prompt, replace(row.params, **kinds[i % 3]), row.seed)  # type: ignore[arg-type]
        for i, row in enumerate(free[0])
    ]
    want = reference(tiny, rows, eos=eos)
    harness = Harness(tiny, k=3, drafter=oracle(rows, want), async_scheduling=asynchronous, eos=eos)
    got = harness.run(rows)
    assert [(r.token_ids, r.stop) for r in got] == [(r.token_ids, r.stop) for r in want]
    assert {r.finish_reason for r in got} == {"stop", "length"}
    assert all(len(r.token_ids) >= 7 for r in got)
    assert_device_agrees(harness, len(rows))


def assert_device_agrees(harness: Harness, num_rows: int) -> None:
    """All rows ended by what the device knows of: every slot that was used is finished, and at its own length."""
    states = harness.worker.states
    used = min(num_rows, harness.config.max_num_seqs)
    assert int(states.finished.sum()) == used
    assert not states.finished[-1], "the row that belongs to nobody"


PER_SLOT = ("token_ids", "total_len", "num_computed_tokens", "last_sampled", "draft_tokens", "output_counts")


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_after_the_end_changes_nothing_of_the_row(
    tiny: Path, tmp_path: Path, free: tuple[list[Row], list[Result]], k: int, layers: int
) -> None:
    from tiny import write_checkpoint

    folder = tiny if layers == 1 else write_checkpoint(tmp_path, num_nextn_predict_layers=2)
    rng = random.Random(k)
    rows = [replace_end(row, rng) for row in free[0]]
    eos = [3, 9]
    want = reference(folder, rows, eos=eos)
    harness = Harness(folder, k=k, max_num_seqs=6, async_scheduling=True, eos=eos)
    states, runner, kv = harness.worker.states, harness.worker.runner, harness.worker.kv_caches
    num_late = 0

    def wrapped(step: SchedulerOutput) -> None:
        nonlocal num_late
        new = {row.slot for row in step.new_rows}
        late = [row for row in step.rows if row.slot not in new and bool(states.finished[row.slot])]
        num_late += len(late)
        slots = [row.slot for row in late]
        before = {name: getattr(states, name)[slots].clone() for name in PER_SLOT}
        # blocks that the row holds, and gains in this step
        blocks = [sorted({int(b) for b in states.block_tables[row.slot]} | set(row.new_blocks) - {0}) for row in late]
        held = [kv[:, own].clone() for own in blocks]
        execute(step)
        after_sampling.append(lambda: check(before, slots, blocks, held))

    def check(before: dict[str, torch.Tensor], slots: list[int], blocks: list[list[int]], held: Any) -> None:
        for name, values in before.items():
            assert torch.equal(getattr(states, name)[slots], values), name
        for own, values in zip(blocks, held, strict=True):
            assert torch.equal(kv[:, own], values), "KV was written behind the end"

    def sampled() -> Any:
        result = sample()
        after_sampling.pop()()
        return result

    after_sampling: list[Any] = []
    execute, sample = runner.execute_model, runner.sample_tokens
    runner.execute_model, runner.sample_tokens = wrapped, sampled  # type: ignore[method-assign]
    got = harness.run(rows)
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert num_late > 0, "no step was launched too late"


def replace_end(row: Row, rng: random.Random) -> Row:
    params = replace(row.params, stop_token_ids=(rng.randrange(VOCAB), rng.randrange(VOCAB)))
    return Row(row.prompt, params, row.seed)


def test_a_slots_next_owner_is_not_finished(tiny: Path, free: tuple[list[Row], list[Result]]) -> None:
    """One slot, ends of all kinds one after the other, each row's own."""
    rows = []
    for i, (row, whole) in enumerate(zip(*free, strict=True)):
        params = replace(row.params, max_tokens=3 + i % 5, stop_token_ids=(whole.token_ids[4],) if i % 2 else ())
        rows.append(Row(row.prompt, params, row.seed))
    got = run_rows(tiny, rows, k=2, max_num_seqs=1, async_scheduling=True)
    assert [r.token_ids for r in got] == [r.token_ids for r in reference(tiny, rows)]


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_nothing_is_drafted_that_no_step_can_use(tiny: Path, max_tokens: int, num_drafts: int) -> None:
    """A draft is of use if its row may still give two tokens and more after this step."""
    harness = Harness(tiny, k=3)
    mtp = harness.worker.model.mtp
    assert mtp is not None
    calls: list[int] = []
    inner = mtp.compute_logits
    mtp.compute_logits = lambda layer, hidden: (calls.append(layer), inner(layer, hidden))[1]  # type: ignore[method-assign]
    params = replace(FREE, temperature=0.0, max_tokens=max_tokens)
    steps = harness.seen_steps()
    harness.run([Row([5, 6, 7], params, seed=i) for i in range(2)])
    assert steps[0].num_spec_tokens == num_drafts
    assert len(calls) == sum(step.num_spec_tokens for step in steps)
    assert steps[-1].num_spec_tokens == 0


def test_plain_decoding_carries_nothing_of_the_drafter(tiny: Path) -> None:
    plain, drafting = Harness(tiny, k=0).worker, Harness(tiny, k=1).worker
    assert plain.model.mtp is None and plain.runner.drafter is None and plain.num_draft_layers == 0
    assert plain.model.num_bytes < drafting.model.num_bytes
    assert plain.kv_caches.shape[0] == plain.config.model.num_hidden_layers == drafting.kv_caches.shape[0] - 1
    assert plain.block_bytes * 3 == drafting.block_bytes * 2
    assert plain.states.draft_tokens.numel() == plain.states.draft_logits.numel() == 0
