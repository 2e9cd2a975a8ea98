"""Whether two runs that gave different tokens differ by rounding or in earnest, from their logits at that place.

Knows the rule and applies it to one position. Does not know engines, rows or files.

The rule. `gap` is the distance of the two tokens' scores on the side where it is larger, `noise` the largest
difference of the two sides' logits at the position, both in units of logits (scores times the temperature). The
difference is a near-tie if noise is at most `ROUNDING_FACTOR` tolerances, more than any rounding gives, and either gap
is at most `NOISE_FACTOR` times noise, or gap is at most the tolerance of the dtype; or if one side's top-k, top-p or
the like kept a token that the other side's removed, and each side's logits give the token that its run gave.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgen.worker.probe import PositionLogits

NOISE_FACTOR = 4.0
ROUNDING_FACTOR = 20.0
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
_TOP = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token with its text, its logit and its score (see `PositionLogits`)."""

    token_id: int
    text: str
    logit: float
    score: float


@dataclass(frozen=True, slots=True)
class SideAt:
    """One run at the first difference.

    token_id: what the run gave, None if it had ended, or ended for another reason; text: of the token, or that reason.
    top_two: the best scores after the same tokens before (-inf: removed by a filter). lead: the score of the run's own
    token less that of the other run's, in units of logits. reproduced: whether these logits give the run's token.
    """

    name: str
    token_id: int | None
    text: str
    top_two: tuple[Candidate, ...] = ()
    lead: float | None = None
    reproduced: bool | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a row; position: of the output token, from 0. gap, noise and reason: by the rule.

    gap and noise are None where one run ended and the other went on.
    """

    position: int
    speculative: SideAt
    other: SideAt
    gap: float | None
    noise: float | None
    is_near_tie: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RunAt:
    """What a run gave at a position, with its logits there."""

    name: str
    token_id: int
    logits: PositionLogits


def judge(
    position: int, ours: RunAt, other: RunAt, temperature: float, tolerance: float, text_of: Callable[[int], str]
) -> Difference:
    """Return the difference with its judgement; `tolerance` in units of logits, see `TOLERANCES`."""
    unit = temperature or 1.0
    sides = (_side(ours, other.token_id, unit, text_of), _side(other, ours.token_id, unit, text_of))
    noise = max(
        _largest_difference(ours.logits.logits, other.logits.logits),
        _largest_difference(ours.logits.scores, other.logits.scores) * unit,
    )
    leads = [math.inf if side.lead is None or math.isnan(side.lead) else side.lead for side in sides]
    gap = max(map(abs, leads))
    is_near_tie, reason = _verdict(gap, noise, tolerance, all(side.reproduced for side in sides))
    return Difference(position, *sides, gap, noise, is_near_tie, reason)


def ended(position: int, ours: SideAt, other: SideAt) -> Difference:
    """Return the difference of two runs of which one ended, or for another reason, after the same tokens."""
    return Difference(position, ours, other, None, None, False, "the same tokens, and the runs did not end alike")


def _verdict(gap: float, noise: float, tolerance: float, is_reproduced: bool) -> tuple[bool, str]:
    if not noise <= ROUNDING_FACTOR * tolerance:  # NaN too
        return False, f"the logits differ by more than rounding does ({ROUNDING_FACTOR * tolerance:g})"
    if gap <= NOISE_FACTOR * noise:
        return True, f"the gap is within {NOISE_FACTOR:g} times the difference of the logits"
    if gap <= tolerance:
        return True, f"the gap is within the tolerance ({tolerance:g})"
    if math.isinf(gap) and is_reproduced and noise > 0:
        return True, "the logits differ by rounding, and a token lies on the edge of what a filter keeps"
    return False, f"the gap is larger than {NOISE_FACTOR:g} times the difference of the logits and than {tolerance:g}"


def _side(run: RunAt, rival: int, unit: float, text_of: Callable[[int], str]) -> SideAt:
    logits, scores = run.logits.logits, run.logits.scores
    return SideAt(
        run.name,
        run.token_id,
        text_of(run.token_id),
        tuple(Candidate(i, text_of(i), float(logits[i]), float(scores[i])) for i in _best(logits, scores)),
        float(scores[run.token_id].double() - scores[rival].double()) * unit,
        run.logits.token_id == run.token_id,
    )


def _best(logits: torch.Tensor, scores: torch.Tensor) -> list[int]:
    """The tokens of the best scores; where filters leave fewer, of the largest logits behind them."""
    kept = scores > -torch.inf  # not NaN
    count = min(_TOP, len(scores))
    by_score, by_logit = (
        # stable: the lower id of equals comes first, as it does when one is sampled
        torch.sort(values, descending=True, stable=True).indices[:count].tolist()
        for values in (scores.where(kept, -torch.inf), logits.nan_to_num(nan=-torch.inf).where(~kept, -torch.inf))
    )
    return [*by_score[: int(kept.sum())], *by_logit][:count]


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference where both are not masked (-inf); NaN or +inf on one side only makes it infinite."""
    both = (a != -torch.inf) & (b != -torch.inf) & (a != b)
    apart = (a[both].double() - b[both].double()).abs()
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0
