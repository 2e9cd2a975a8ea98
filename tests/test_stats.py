"""Counts add up; rates are derived; a looping row is told from a story."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.stats import RunStats, SpecStats, is_looping

# A step: drafts made, drafts kept, and whether a recovered or bonus token followed them (the row may end before it).
STEPS = st.lists(
    st.integers(0, 5).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted), st.booleans())),
    max_size=30,
)


def observed(steps: list[tuple[int, int, bool]]) -> SpecStats:
    stats = SpecStats()
    for drafted, accepted, more in steps:
        stats.observe(drafted, accepted, accepted + more)
    return stats


@given(STEPS)
def test_counts_add_up(steps: list[tuple[int, int, bool]]) -> None:
    stats = observed(steps)
    assert stats.steps == len(steps)
    assert stats.drafted == sum(stats.drafted_per_pos) == sum(step[0] for step in steps)
    assert stats.accepted == sum(stats.accepted_per_pos) == sum(step[1] for step in steps)
    assert stats.emitted == sum(accepted + more for _, accepted, more in steps)
    assert all(a <= d for a, d in zip(stats.accepted_per_pos, stats.drafted_per_pos, strict=True))
    assert stats.accepted_per_pos == sorted(stats.accepted_per_pos, reverse=True)


@given(STEPS, STEPS)
def test_the_sum_of_rows_is_the_total(one: list[tuple[int, int, bool]], two: list[tuple[int, int, bool]]) -> None:
    total = observed(one)
    total.add(observed(two))
    assert total == observed(one + two)


def test_positions_are_divided_by_the_drafts_made_there() -> None:
    stats = observed([(3, 3, True), (1, 0, True), (3, 1, True), (0, 0, True)])
    assert stats.drafted_per_pos == [3, 2, 2]
    assert stats.acceptance_per_pos == [2 / 3, 1 / 2, 1 / 2]
    assert stats.acceptance_rate == 4 / 7
    assert stats.mean_accepted_length == 8 / 4


def test_no_step_gives_zero_and_not_an_error() -> None:
    stats = SpecStats()
    assert (stats.mean_accepted_length, stats.acceptance_rate, stats.acceptance_per_pos) == (0.0, 0.0, [])


def test_impossible_steps_are_our_bug() -> None:
    for step in [(1, 2, 2), (2, 1, 3), (2, 2, 1), (0, -1, 0)]:
        with pytest.raises(AssertionError):
            SpecStats().observe(*step)


def test_loops_are_told_from_text() -> None:
    story = [(7 * i * i + i) % 997 for i in range(300)]
    assert not is_looping(story)
    assert not is_looping([5] * 23)
    assert is_looping([*story, *[5] * 24])
    assert is_looping([*story, *[1, 2, 3, 4, 5] * 5])
    sentence = story[:64]
    assert is_looping([*story, *sentence * 3])
    assert not is_looping([*story, *sentence[:63] * 2])
    assert not is_looping([*sentence * 3, 1])
    assert not is_looping([])


def test_run_stats_count_rows_and_weigh_means() -> None:
    run = RunStats(wall_seconds=2.0)
    run.count_row("stop", prompt_tokens=3, token_ids=[5] * 30 + [1], text="x", spec=observed([(3, 3, True)] * 4))
    run.count_row("length", prompt_tokens=4, cached_tokens=2, token_ids=[1], text=" \n", spec=observed([(3, 0, True)]))
    run.count_row("error", error_code="bad_json")
    assert (run.rows, run.ok, run.failed, run.empty, run.looping) == (3, 2, 1, 1, 1)
    assert run.micro_mean_accepted_length == 17 / 5
    assert run.macro_mean_accepted_length == (4.0 + 1.0) / 2
    assert run.tokens_per_second == 16.0
    told = run.as_dict()
    assert told["usage"] == {"prompt_tokens": 7, "completion_tokens": 32, "cached_tokens": 2}
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_warnings_name_what_a_reader_must_know() -> None:
    run = RunStats()
    for _ in range(4):
        run.count_row("stop", text="x", token_ids=[1])
    run.count_row("length", text="x", token_ids=[1])
    assert run.warnings() == []  # exactly 20 %
    run.count_row("length", text="", token_ids=[1])
    run.count_row("error", error_code="bad_id")
    text = "\n".join(run.warnings())
    assert "2 of 7 answers were cut" in text
    assert "1 row gave an empty answer" in text
    assert "bad_id × 1" in text


def test_an_empty_run_has_statistics_too() -> None:
    assert RunStats().warnings() == []
    json.dumps(RunStats().as_dict(), allow_nan=False)


@given(st.data())
def test_steps_counted_at_once_are_those_counted_one_by_one(data: st.DataObject) -> None:
    num_drafted = data.draw(st.integers(1, 5))
    accepted = data.draw(st.lists(st.integers(0, num_drafted), min_size=1, max_size=9))
    bonus = data.draw(st.lists(st.integers(0, 1), min_size=len(accepted), max_size=len(accepted)))
    one_by_one, at_once = SpecStats(), SpecStats()
    for stats in (one_by_one, at_once):
        stats.observe(1, 0, 1)
    for kept, more in zip(accepted, bonus, strict=True):
        one_by_one.observe(num_drafted, kept, kept + more)
    at_once.observe_steps(num_drafted, accepted, sum(accepted) + sum(bonus))
    assert at_once == one_by_one
