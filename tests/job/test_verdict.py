"""The rule that tells rounding from a real difference, on logits written by hand."""

import math

import pytest
import torch

from specgen.job.verdict import Difference, RunAt, SideAt, ended, judge
from specgen.worker.probe import PositionLogits

INF = math.inf


def at(name: str, token_id: int, scores: list[float], logits: list[float] | None = None, gives: int = -1) -> RunAt:
    """A run that gave `token_id`; its logits are its scores unless given."""
    given = torch.tensor(scores)
    sampled = gives if gives >= 0 else int(given.nan_to_num(nan=-INF).argmax())
    return RunAt(name, token_id, PositionLogits(torch.tensor(logits) if logits else given, given, sampled))


def judged(ours: RunAt, other: RunAt, temperature: float = 0.0, tolerance: float = 1e-4) -> Difference:
    return judge(3, ours, other, temperature, tolerance, "abcdef".__getitem__)


def test_both_sides_are_described() -> None:
    difference = judged(at("a", 2, [1.0, 2.0, 2.5]), at("b", 1, [1.0, 2.25, 2.125]))
    assert difference.position == 3
    assert difference.speculative.token_id == 2
    assert difference.speculative.text == "c"
    assert [(c.token_id, c.text, c.score) for c in difference.other.top_two] == [(1, "b", 2.25), (2, "c", 2.125)]
    assert (difference.speculative.lead, difference.other.lead) == (0.5, 0.125)
    assert difference.gap == 0.5
    assert difference.noise == 0.375
    assert difference.speculative.reproduced
    assert difference.other.reproduced


def test_the_lower_id_of_equals_is_the_better() -> None:
    difference = judged(at("ours", 1, [0.0, 5.0, 5.0, 5.0]), at("other", 2, [5.0, 5.0, 6.0, 5.0]))
    assert [c.token_id for c in difference.speculative.top_two] == [1, 2]
    assert [c.token_id for c in difference.other.top_two] == [2, 0]


def test_what_filters_removed_ranks_by_its_logit() -> None:
    ours = at("ours", 2, [-INF, -INF, 7.0, -INF], [1.0, 3.0, 2.0, math.nan])
    other = at("other", 1, [-INF, 5.0, 6.0, math.nan], [1.0, 3.0, 2.0, 9.0])
    difference = judged(ours, other)
    assert [(c.token_id, c.logit, c.score) for c in difference.speculative.top_two] == [(2, 2.0, 7.0), (1, 3.0, -INF)]
    assert [c.token_id for c in difference.other.top_two] == [2, 1]


@pytest.mark.parametrize(
    ("ours", "other", "is_near_tie", "reason"),
    [
        ([0.0, 5.0, 5.00001], [0.0, 5.00001, 5.0], True, "times the difference"),
        ([0.0, 5.0, 5.00005], [0.0, 5.0, 5.00005], True, "tolerance"),
        ([0.0, 5.0, 5.001], [0.0, 5.0, 5.001], False, "gap is larger"),
        ([0.0, 5.0, 5.0010], [0.0, 5.0, 5.0008], False, "gap is larger"),
        ([0.0, 5.0, 5.0010], [0.0, 5.0, 5.0004], True, "times the difference"),
        ([0.0, 5.0, 9.0], [0.0, 5.0, 4.0], False, "more than rounding"),  # though the gap is within 4 times 5
        ([0.1, 5.0, 5.00001], [0.0, 5.00001, 5.0], False, "more than rounding"),  # a third token's logit is off
        ([0.0, 5.0, 5.0], [0.0, 5.0, 5.0], True, "times the difference"),
        ([0.0, math.nan, 5.0], [0.0, 5.00001, 5.0], False, "more than rounding"),
        ([0.0, 5.0, INF], [0.0, 5.0, 4.0], False, "more than rounding"),
    ],
)
def test_the_rule_in_float32(ours: list[float], other: list[float], is_near_tie: bool, reason: str) -> None:
    difference = judged(at("ours", 2, ours), at("other", 1, other))
    assert difference.is_near_tie == is_near_tie
    assert reason in difference.reason


def test_the_tolerance_is_that_of_the_dtype() -> None:
    ours, other = at("ours", 2, [0.0, 5.0, 5.03]), at("other", 1, [0.0, 5.0, 5.03])
    assert not judged(ours, other).is_near_tie
    assert judged(ours, other, tolerance=0.05).is_near_tie


def test_scores_count_in_units_of_logits() -> None:
    """At T = 0.01 a score is a hundred logits: 0.005 of it is rounding, as 0.00005 of a logit is."""
    ours, other = at("ours", 1, [500.0, 500.004], [5.0, 5.0]), at("other", 0, [500.001, 500.0], [5.0, 5.0])
    difference = judged(ours, other, temperature=0.01)
    assert difference.gap == pytest.approx(4e-5, rel=0.02)
    assert difference.noise == pytest.approx(4e-5, rel=0.02)
    assert difference.is_near_tie
    assert not judged(ours, other, temperature=1.0).is_near_tie


@pytest.mark.parametrize(("gives", "is_near_tie"), [(2, True), (1, False)])
def test_the_edge_of_a_filter_is_a_near_tie_if_both_sides_give_their_tokens(gives: int, is_near_tie: bool) -> None:
    ours = at("ours", 2, [0.0, 5.0, 7.0], [0.0, 5.0, 4.00001], gives=gives)  # the noise makes 7 of 4
    other = at("other", 1, [0.0, 5.0, -INF], [0.0, 5.0, 4.0])
    difference = judged(ours, other)
    assert difference.gap == INF
    assert difference.is_near_tie == is_near_tie
    same_logits = at("other", 1, [0.0, 5.0, -INF], [0.0, 5.0, 4.00001])
    assert not judged(ours, same_logits).is_near_tie


def test_another_end_is_never_a_near_tie() -> None:
    difference = ended(4, SideAt("a", None, "end of row (stop: <eos>)"), SideAt("b", 3, "d"))
    assert (difference.is_near_tie, difference.gap, difference.noise) == (False, None, None)
