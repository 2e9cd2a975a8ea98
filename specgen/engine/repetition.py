"""Decode steps that the device runs several times in a row, for one round of the host's work.

With many rows of a small model the host takes longer for a step's rows than the device for the step. The device knows
its rows' counts, drafts and ends itself, so that the same step can be launched again before the host has seen what the
last one sampled. Rows that ended, and those that could take their place, wait for the end of the repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

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
_TELLING = 4  # rounds of decode steps that it takes to lower the limit
_FORGOTTEN = 64  # rounds of which too few could be judged


def repeat_step(out: SchedulerOutput, requests: Sequence[Request], kv: KVBlockManager, limit: int) -> bool:
    """Lets step `out` run up to `limit` times; False, and nothing done, if that is once.

    It runs again only as it is: as many drafts a row, no part of a prompt, nothing for the host to look up in between;
    and not oftener than a row is likely to need. `requests`: of its rows, their counts advanced over it once.
    """
    if not out.num_decode_rows:
        return False
    times = 1 + _most_steps_left(requests, limit - 1)
    if times == 1 or any(request.params.logprobs is not None for request in requests):
        return False
    pairs = list(zip(requests, out.rows, strict=True))
    if any(row.num_draft_tokens != min(out.draft_limit, request.num_tokens_left) for request, row in pairs):
        return False
    needed = (kv.num_missing_blocks(r, (times - 1) * row.num_tokens + out.draft_limit) for r, row in pairs)
    if sum(needed) > kv.pool.num_free_blocks:
        return False
    out.times = times
    out.num_spec_tokens = max(row.num_draft_tokens for row in out.rows)
    for request, row in pairs:
        _advance(request, row, out, kv)
    return True


def _most_steps_left(requests: Iterable[Request], most: int) -> int:
    """`most`, or what `_steps_left` gives for the row that takes the most steps, if that is less."""
    found = 0
    for request in requests:
        found = max(found, _steps_left(request))
        if found >= most:
            return most
    return found


def _steps_left(request: Request) -> int:
    """Steps that the request takes beyond those in flight, if it goes on as so far and to its full length."""
    steps, emitted = request.stats.steps, request.stats.emitted
    num_left = request.max_tokens - request.num_output_tokens
    return math.ceil(num_left * steps / emitted if emitted else num_left) - request.num_sampling_steps_in_flight


def _advance(request: Request, row: ScheduledRow, out: SchedulerOutput, kv: KVBlockManager) -> None:
    """Advances a request's counts over the repetitions of its row, which gets the blocks for them.

    Like all counts of what is in flight these are bounds, and may lie beyond the row's end, where the device stops.
    """
    num_more = out.num_repeated(row)
    request.num_computed_tokens += num_more
    request.num_output_placeholders += num_more
    request.num_sampling_steps_in_flight += out.times - 1
    num_next = request.num_lookahead_slots = request.num_usable_drafts(out.draft_limit)
    request.spec_token_ids = [-1] * num_next
    blocks = kv.allocate_slots(request, 0, num_next)
    assert blocks is not None, "the blocks were counted before"
    row.new_blocks.extend(blocks)


class _Before(NamedTuple):
    """What was before the limit was raised for a trial: the limit, tokens a second, and whether prompts were read."""

    limit: int
    rate: float
    beside_prompts: bool


class RepeatLimit:
    """How often a decode step may run, `limit`: as often as gives the device work while the host is at the last one's.

    Follows the clock. Under exact verification what it chooses changes the speed and never a token.

    It is raised where the host comes late, if only now and then, and stays so if that gives more tokens a second: rows
    that end in between stay without work until the host knows. Rounds with parts of prompts tell of a late host, too,
    though such a step runs once: where rows end in every step there are no other rounds. A raised limit makes the
    scheduler put repeated steps between those that admit rows.
    """

    def __init__(self) -> None:
        """Starts with 1."""
        self.limit = 1
        self.is_held = False  # true: what rounds take says nothing now
        self._last: float | None = None  # when the round before was done
        self._before_trial: _Before | None = None
        self._rest = 0  # judgements to come before it may be raised again
        self._leap = _LEAP  # what it is multiplied by at most; 2 from a trial that failed to one that does not
        self._start_over()

    def _start_over(self) -> None:
        # since the limit was last judged: the parts of rounds that the host waited, of decode steps and beside prompts
        self._shares: list[float] = []
        self._shares_beside_prompts: list[float] = []
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0  # of all, those that say nothing of the host included

    def restart(self) -> None:
        """The device has run dry: the time until its next results says nothing."""
        self._last = None

    def round_done(self, step: SchedulerOutput, output: ModelRunnerOutput, waited: float | None, now: float) -> None:
        """Takes in what a step gave, for which the host waited so long, and the time at which it had it; in seconds.

        `waited` is None where it does not tell whether the host came late.
        """
        last, self._last = self._last, now
        if self.is_held or last is None or now <= last:
            return
        self._rounds += 1
        self._tokens += sum(map(len, output.sampled_token_ids))
        self._seconds += now - last
        if waited is not None:
            self._take_share(step, waited / (now - last))
        if len(self._shares) + len(self._shares_beside_prompts) == _JUDGED:
            self._judge(self._tokens / self._seconds)
            self._start_over()
        elif self._rounds == _FORGOTTEN:
            self._undo_trial()
            self._start_over()

    def _take_share(self, step: SchedulerOutput, share: float) -> None:
        if not step.num_decode_rows:
            self._shares_beside_prompts.append(share)
        elif step.times == self.limit:
            self._shares.append(share)

    def _undo_trial(self) -> None:
        if self._before_trial is not None:
            self.limit, self._before_trial = self._before_trial.limit, None

    def _judge(self, rate: float) -> None:
        beside_prompts = bool(self._shares_beside_prompts)
        self._rest = max(0, self._rest - 1)
        before = self._before_trial
        if before is not None:
            if before.beside_prompts != beside_prompts:
                self._undo_trial()  # not the same work
                return
            if rate < _GAIN * before.rate:
                self._undo_trial()
                self._rest, self._leap = _REST, 2
                return
            self._before_trial, self._leap = None, _LEAP
        num_late = self._num_late()
        if num_late > _FEW_LATE and self.limit < _MOST and not self._rest and rate > 0:
            self._before_trial = _Before(self.limit, rate, beside_prompts)
            self.limit = min(_MOST, (self._leap if 2 * num_late > _JUDGED else 2) * self.limit)
        elif not num_late and len(self._shares) >= _TELLING and (waited := median(self._shares)) > _DEVICE_BOUND:
            self.limit = max(1, math.ceil(self.limit * (1 - waited) / (1 - _AIM)))

    def _num_late(self) -> int:
        """Rounds for which the host came late; of those beside prompts, in which graphs are captured, most or none."""
        num_late = sum(share < _LATE for share in self._shares)
        num_beside = sum(share < _LATE for share in self._shares_beside_prompts)
        return num_late + num_beside if 2 * num_beside > len(self._shares_beside_prompts) else num_late
