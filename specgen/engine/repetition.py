"""Decode steps that the device runs several times in a row, for one round of the host's work.

With many rows of a small model the host takes longer for a step's rows than the device for the step. The device knows
its rows' counts, drafts and ends itself, so that the same step can be launched again before the host has seen what the
last one sampled. Rows that ended, and those that could take their place, wait for the end of the repetitions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.request import Request
from specgen.engine.step import ScheduledRow, SchedulerOutput

_MOST = 8  # repetitions: rows that ended wait for twice as many at worst
_JUDGED = 8  # rounds of the host's work that are looked at together
_BUSY = 0.05  # share of a round that the host waits for the device, below which the device may be waiting for the host
_IDLE = 0.35  # above which fewer repetitions would do
_AIM = 0.2


def repeat_step(out: SchedulerOutput, requests: Sequence[Request], kv: KVBlockManager, limit: int) -> bool:
    """Lets step `out` run up to `limit` times, as often as any row needs; False, and nothing done, if that is once.

    It runs again only as it is: as many drafts a row, no part of a prompt, nothing for the host to look up in between.
    `requests`: of its rows, their counts advanced over it once.
    """
    if limit == 1 or not out.num_decode_rows:
        return False
    times = min(limit, 1 + max(request.num_tokens_left for request in requests))
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


def _repeated(request: Request, row: ScheduledRow, out: SchedulerOutput, kv: KVBlockManager) -> ScheduledRow:
    """The row of a step that runs so often, and the request's counts advanced over it.

    Like all counts of what is in flight these are bounds, and may lie beyond the row's end, where the device stops.
    """
    num_more = (out.times - 1) * row.num_tokens
    request.num_computed_tokens += num_more
    request.num_output_placeholders += num_more
    request.num_sampling_steps_in_flight += out.times - 1
    num_next = request.num_lookahead_slots = max(0, min(out.draft_limit, request.num_tokens_left - 1))
    request.spec_token_ids = [-1] * num_next
    blocks = kv.allocate_slots(request, 0, num_next)
    assert blocks is not None, "the blocks were counted before"
    return row._replace(
        new_blocks=row.new_blocks + blocks, num_computed_after=request.num_computed_tokens, num_repeated=num_more
    )


class RepeatLimit:
    """How often a decode step may run, `limit`: as seldom as keeps the device busy while the host works.

    Follows a clock. What it chooses changes the speed and never a token.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts with 1; `clock` gives seconds."""
        self.limit = 1
        self._clock = clock
        self._before: float | None = None
        self._waited: deque[float] = deque(maxlen=_JUDGED)  # shares of the last rounds

    def restart(self) -> None:
        """The device has run dry: the time until its next results says nothing."""
        self._before = None

    def round_done(self, waited: float) -> None:
        """Takes in that a step's results have come, for which the host waited so many seconds; chooses `limit` anew."""
        now = self._clock()
        if self._before is not None and now > self._before:
            self._waited.append(waited / (now - self._before))
        self._before = now
        if len(self._waited) == _JUDGED:
            self._choose(median(self._waited))

    def _choose(self, waited: float) -> None:
        limit = self.limit
        if waited < _BUSY:
            limit = min(_MOST, 2 * limit)
        elif waited > _IDLE:
            limit = max(1, math.ceil(limit * (1 - waited) / (1 - _AIM)))
        if limit != self.limit:
            self.limit = limit
            self._waited.clear()
