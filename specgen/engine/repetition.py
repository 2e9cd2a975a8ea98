"""Decode steps that the device runs several times in a row, for one round of the host's work.

With many rows of a small model the host takes longer for a step's rows than the device for the step. The device knows
its rows' counts, drafts and ends itself, so that the same step can be launched again before the host has seen what the
last one sampled. Rows that ended, and those that could take their place, wait for the end of the repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.request import Request
from specgen.engine.step import ModelRunnerOutput, ScheduledRow, SchedulerOutput

_MOST = 8  # repetitions: rows that ended wait for twice as many at worst
_JUDGED = 16  # rounds of the host's work that are looked at together
_LATE = 0.02  # share of a round that the host waits, below which the device may have waited for it
_FEW_LATE = 1  # late rounds that are let pass
_LEAP = 4  # the limit's factor where most are late; 2 elsewhere, and after a trial that failed
_DEVICE_BOUND = 0.5  # share from which on, if no round is late, fewer repetitions do, down to where it is _AIM
_AIM = 0.3
_GAIN = 1.01  # what more repetitions must bring
_REST = 8  # judgements after they did not


def repeat_step(out: SchedulerOutput, requests: Sequence[Request], kv: KVBlockManager, limit: int) -> bool:
    """Lets step `out` run up to `limit` times; False, and nothing done, if that is once.

    It runs again only as it is: as many drafts a row, no part of a prompt, nothing for the host to look up in between;
    and not oftener than a row is likely to need. `requests`: of its rows, their counts advanced over it once.
    """
    if not out.num_decode_rows:
        return False
    times = min(limit, 1 + max(map(_steps_left, requests)))
    if times <= 1 or any(request.params.logprobs is not None for request in requests):
        return False
    pairs = list(zip(requests, out.rows, strict=True))
    if any(row.num_draft_tokens != min(out.draft_limit, request.num_tokens_left) for request, row in pairs):
        return False
    needed = (kv.num_missing_blocks(r, (times - 1) * row.num_tokens + out.draft_limit) for r, row in pairs)
    if sum(needed) > kv.pool.num_free_blocks:
        return False
    out.times = times
    out.rows = [_repeated(request, row, out, kv) for request, row in pairs]
    out.num_spec_tokens = max(row.num_draft_tokens for row in out.rows)
    return True


def _steps_left(request: Request) -> int:
    """Steps that the request takes beyond those in flight, if it goes on as so far and to its full length."""
    steps, emitted = request.stats.steps, request.stats.emitted
    num_left = request.max_tokens - request.num_output_tokens
    return math.ceil(num_left * steps / emitted if emitted else num_left) - request.num_sampling_steps_in_flight


def _repeated(request: Request, row: ScheduledRow, out: SchedulerOutput, kv: KVBlockManager) -> ScheduledRow:
    """The row of a step that runs so often, and the request's counts advanced over it.

    Like all counts of what is in flight these are bounds, and may lie beyond the row's end, where the device stops.
    """
    num_more = (out.times - 1) * row.num_tokens
    request.num_computed_tokens += num_more
    request.num_output_placeholders += num_more
    request.num_sampling_steps_in_flight += out.times - 1
    num_next = request.num_lookahead_slots = request.num_usable_drafts(out.draft_limit)
    request.spec_token_ids = [-1] * num_next
    blocks = kv.allocate_slots(request, 0, num_next)
    assert blocks is not None, "the blocks were counted before"
    return row._replace(
        new_blocks=row.new_blocks + blocks, num_computed_after=request.num_computed_tokens, num_repeated=num_more
    )


class RepeatLimit:
    """How often a decode step may run, `limit`: as often as gives the device work while the host is at the last one's.

    Follows the clock. Under exact verification what it chooses changes the speed and never a token.

    It is raised where the host comes late, if only now and then, and stays so if that gives more tokens a second: rows
    that end in between stay without work until the host knows. That goes for steps with parts of prompts, too, which
    run once: where rows end in every step and others take their place there are no other ones, unless steps that run
    several times stand between them, for which rows are admitted less often (`Scheduler.schedule`).
    """

    def __init__(self) -> None:
        """Starts with 1."""
        self.limit = 1
        self.is_held = False  # true: what rounds take says nothing now
        self._before: float | None = None
        # shares of rounds since the limit was last judged, of decode steps and of those with parts of prompts
        self._waited: list[float] = []
        self._waited_beside_prompts: list[float] = []
        self._tokens, self._seconds = 0, 0.0  # of all rounds since then
        self._before_trial: tuple[int, float] | None = None  # the limit and tokens a second before it was last raised
        self._rest = 0  # judgements to come before it may be raised again
        self._leap = _LEAP  # what it may be multiplied by

    def restart(self) -> None:
        """The device has run dry: the time until its next results says nothing."""
        self._before = None

    def round_done(self, step: SchedulerOutput, output: ModelRunnerOutput, asked: float, now: float) -> None:
        """Takes in what a step gave, for which the host asked at one time and had it at another, in seconds."""
        before, self._before = self._before, now
        if self.is_held or before is None or now <= before:
            return
        self._tokens += sum(map(len, output.sampled_token_ids))
        self._seconds += now - before
        share = (now - asked) / (now - before)
        if not step.num_decode_rows:
            self._waited_beside_prompts.append(share)
        elif step.times == self.limit:
            self._waited.append(share)
        if len(self._waited) + len(self._waited_beside_prompts) == _JUDGED:
            self._judge(self._tokens / self._seconds)

    def _judge(self, rate: float) -> None:
        num_late = sum(share < _LATE for share in self._waited + self._waited_beside_prompts)
        before, self._before_trial = self._before_trial, None
        self._rest = max(0, self._rest - 1)
        if before is not None and rate < _GAIN * before[1]:
            self.limit, self._rest, self._leap = before[0], _REST, 2
        elif num_late > _FEW_LATE and self.limit < _MOST and not self._rest:
            self._before_trial = self.limit, rate
            self.limit = min(_MOST, (self._leap if 2 * num_late > _JUDGED else 2) * self.limit)
        elif self._waited and not num_late and (waited := median(self._waited)) > _DEVICE_BOUND:
            self.limit = max(1, math.ceil(self.limit * (1 - waited) / (1 - _AIM)))
        self._waited.clear()
        self._waited_beside_prompts.clear()
        self._tokens, self._seconds = 0, 0.0
