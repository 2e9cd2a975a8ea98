"""How many drafts a step makes: what is chosen from what steps take, and that no token depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Harness, Restless, Row, oracle, reference

from specgen.engine.draft_length import DraftLength
from specgen.engine.step import ScheduledRow, SchedulerOutput
from specgen.sampling_params import SamplingParams

Seconds = Callable[[int, int], float]  # of a step of so many rows with so many drafts


class Machine:
    """Steps that take what `seconds` says, and drafts kept by lot: each position's odds if those before it were."""

    def __init__(self, most: int, seconds: Seconds, odds: list[float], seed: int = 0) -> None:
        self.time, self.tokens, self.num_steps = 0.0, 0, 0
        self.seconds, self.odds = seconds, odds
        self.rng = random.Random(seed)
        self.length = DraftLength(most, lambda: self.time)

    def run(self, num_steps: int, num_rows: int, noise: float = 0.0, others: bool = False) -> None:
        """Steps of so many rows; `others`: with a part of a prompt in each, which takes a hundred times as long."""
        for _ in range(num_steps):
            limit = self.length.limit
            rows = [ScheduledRow(i, i, 1 + limit, limit, True, [], 0, 0, 0) for i in range(num_rows)]
            accepted = [self._accepted(limit) for _ in rows]
            if others:
                rows.append(ScheduledRow(99, 99, 50, 0, False, [], 0, 0, 0))
            seconds = self.seconds(num_rows, limit) * (1 + noise * self.rng.random())
            self.time += seconds * (100 if others else 1)
            self.tokens += sum(accepted) + num_rows
            self.num_steps += 1
            self.length.step_done(SchedulerOutput(rows=rows, draft_limit=limit), accepted + [0] * others)

    def _accepted(self, limit: int) -> int:
        for position in range(limit):
            if self.rng.random() >= self.odds[position]:
                return position
        return limit


def costly(num_rows: int, num_drafts: int) -> float:
    """Every draft costs as much as the step."""
    return 1.0 + num_drafts


def free(num_rows: int, num_drafts: int) -> float:
    """A step takes what it takes, drafts or not."""
    return 1.0


def by_rows(num_rows: int, num_drafts: int) -> float:
    """Drafts cost little beside few rows and much beside many."""
    return 1.0 + num_drafts * num_rows / 16


@pytest.mark.parametrize(
    ("seconds", "odds", "want"),
    [
        (costly, [0.6, 0.6, 0.6], 0),
        (free, [0.9, 0.9, 0.9], 3),
        (lambda rows, k: 1.0 + (0.1 if k < 3 else 2.0) * k, [0.9, 0.9, 0.9], 2),
        (lambda rows, k: 1.0 + 0.2 * k, [0.8, 0.0, 0.0], 1),
    ],
)
def test_the_number_with_most_tokens_a_second_is_kept(seconds: Seconds, odds: list[float], want: int) -> None:
    machine = Machine(3, seconds, odds)
    machine.run(200, 4, noise=0.1)
    assert machine.length.best == {7: want}
    assert machine.length.limit == want


def test_drafts_that_never_pay_cost_little() -> None:
    """U50: an adversarial head; plain decoding of the same work takes one second a step."""
    machine = Machine(3, lambda rows, k: 1.0 + 0.5 * k, [0.0, 0.0, 0.0])
    machine.run(2000, 8)
    assert machine.time <= 1.05 * machine.num_steps


def test_each_number_of_rows_has_its_own() -> None:
    machine = Machine(3, by_rows, [0.9, 0.9, 0.9])
    machine.run(200, 1)
    machine.run(200, 64)
    assert machine.length.best == {1: 3, 127: 0}
    machine.run(2, 1)
    assert machine.length.limit == 3
    machine.run(2, 32)
    assert machine.length.limit == 0  # as the nearest number of rows, until it is found out
    assert 63 not in machine.length.best


def test_a_change_of_the_texts_is_noticed() -> None:
    machine = Machine(3, lambda rows, k: 1.0 + 0.3 * k, [0.0, 0.0, 0.0])
    machine.run(300, 4)
    assert machine.length.limit == 0
    machine.odds = [0.95, 0.95, 0.95]
    machine.run(3000, 4)
    assert machine.length.best == {7: 3}


def test_a_choice_by_chance_is_soon_taken_back() -> None:
    """Steps with drafts took half their time while they were tried."""
    slow = [False]
    machine = Machine(2, lambda rows, k: 1.0 + k * (1.0 if slow[0] else 0.1), [0.6, 0.6])
    machine.run(40, 4)
    assert machine.length.limit == 2
    slow[0] = True
    machine.run(60, 4)
    assert machine.length.limit == 0


def test_steps_with_parts_of_prompts_tell_nothing() -> None:
    machine = Machine(2, free, [0.9, 0.9])
    machine.run(300, 4, others=True)
    assert machine.length.best == {}
    assert machine.length.limit == 2


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_no_token_depends_on_it(tiny: Path, asynchronous: bool) -> None:
    rng = random.Random(5)
    rows = [
        Row(
            [rng.randrange(64) for _ in range(rng.randint(1, 12))],
            SamplingParams(temperature=rng.choice([0.0, 0.9]), max_tokens=rng.randint(1, 30), presence_penalty=0.3),
            seed=i,
        )
        for i in range(24)
    ]
    ref = reference(tiny, rows)
    for drafter in (None, oracle(rows, ref)):
        harness = Harness(
            tiny, k=4, drafter=drafter, async_scheduling=asynchronous, draft_length=Restless(4, random.Random(1))
        )
        got = harness.run(rows)
        assert [r.token_ids for r in got] == [r.token_ids for r in ref]
        made = [r.stats.drafted_per_pos for r in got if r.stats is not None]
        assert any(sum(row) for row in made)
    if not asynchronous:  # an oracle's drafts are all kept, however many there are; else places are counted
        assert all(r.stats is not None and r.stats.accepted == r.stats.drafted for r in got)


@pytest.mark.parametrize(("change", "cost", "want"), [(1, 1.0, 0), (0, 0.0, 2)], ids=["anti", "oracle"])
def test_an_engine_follows_it(tiny: Path, change: int, cost: float, want: int) -> None:
    """By a clock of what steps would take: drafts that are never kept are no longer made, and the best ones all are."""
    rows = [Row([1 + i], SamplingParams(temperature=0.0, max_tokens=200), seed=i) for i in range(4)]
    ref = reference(tiny, rows)
    time = 0.0

    def clock() -> float:
        nonlocal time
        time += 1.0 + cost * harness.scheduler.draft_limit
        return time

    drafter = oracle(rows, ref, lambda token: (token + change) % 64)
    harness = Harness(tiny, k=2, drafter=drafter, draft_length=DraftLength(2, clock))
    got = harness.run(rows)
    assert [r.token_ids for r in got] == [r.token_ids for r in ref]
    assert harness.scheduler.draft_limit == want
