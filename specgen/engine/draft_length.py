"""How many drafts a step is to make: as many as give most tokens a second, found while the rows run.

Knows what decode-only steps took and which drafts were kept, by the number of rows in powers of two; nothing of tensors
or of why. Under exact verification the choice changes the speed and never a token, so it may follow a clock.

A new number of rows begins with what the nearest one has found. Then every number of drafts is tried for a few steps,
and the best one is kept until its steps show that another one is better. From time to time its neighbours are tried
again, and the largest number, which alone tells how good later drafts are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from specgen.engine.step import SchedulerOutput

_SAMPLES = 6  # steps of a trial
_LOOK_AGAIN = 512  # steps from one look at other numbers to the next
_MARGIN = 1.03  # more drafts must be better by so much: steps differ by chance, and rows end less evenly
_FORGET = 0.995  # what of the counts of drafts is left after a step with drafts


@dataclass(slots=True)
class _Rows:
    """What is known of steps with about so many rows."""

    best: int
    is_found: bool = False  # else what the nearest number of rows has found
    seconds: dict[int, deque[float]] = field(default_factory=dict)  # a step with so many drafts, the last few
    trials: deque[int] = field(default_factory=deque)  # numbers to try, the first one now
    num_samples: int = 0  # of the present number, since it was last judged
    steps_to_look: int = _SAMPLES


class DraftLength:
    """The number of drafts for the next steps, `limit`, from 0 to `most`."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts with `most`; `clock` gives seconds."""
        self.most = most
        self.limit = most
        self._clock = clock
        self._rows: dict[int, _Rows] = {}
        self._drafted = [0.0] * most
        self._accepted = [0.0] * most
        self._before: tuple[int, int, float] | None = None  # size, drafts and end of the decode step before

    @property
    def best(self) -> dict[int, int]:
        """The number of drafts kept, by the largest number of rows that it goes for; where all have been tried."""
        return {(1 << size) - 1: rows.best for size, rows in sorted(self._rows.items()) if rows.is_found}

    def tokens_a_row(self, num_drafts: int) -> float:
        """Tokens that a step with so many drafts is expected to give a row: one, and those of the drafts kept."""
        kept = zip(self._accepted[:num_drafts], self._drafted[:num_drafts], strict=True)
        return 1.0 + sum(accepted / drafted if drafted else 0.0 for accepted, drafted in kept)

    def step_done(self, step: SchedulerOutput, num_accepted: Sequence[int]) -> None:
        """Takes in a step that has just ended, and chooses `limit` anew. num_accepted: drafts kept, by row."""
        self._count(step, num_accepted)
        num_rows = step.num_decode_rows
        if not num_rows:
            self._before = None  # with parts of prompts a step takes what these take
            return
        now, size = self._clock(), num_rows.bit_length()
        rows = self._rows_of(size)
        drafts = step.draft_limit
        if self._before is not None and self._before[:2] == (size, drafts):
            rows.seconds.setdefault(drafts, deque(maxlen=_SAMPLES)).append(now - self._before[2])
            rows.num_samples += drafts == self.limit
            rows.steps_to_look -= 1
        self._before = size, drafts, now
        self._choose(rows)

    def _count(self, step: SchedulerOutput, num_accepted: Sequence[int]) -> None:
        if not any(row.num_draft_tokens for row in step.rows):
            return
        self._drafted = [count * _FORGET for count in self._drafted]
        self._accepted = [count * _FORGET for count in self._accepted]
        for row, accepted in zip(step.rows, num_accepted, strict=True):
            for position in range(row.num_draft_tokens):
                self._drafted[position] += 1
                self._accepted[position] += position < accepted

    def _rows_of(self, size: int) -> _Rows:
        if size not in self._rows:
            near = min(self._rows, key=lambda known: abs(known - size), default=None)
            self._rows[size] = _Rows(self._rows[near].best if near is not None else self.most)
        return self._rows[size]

    def _choose(self, rows: _Rows) -> None:
        if rows.trials:
            if self.limit == rows.trials[0] and rows.num_samples >= _SAMPLES:
                rows.trials.popleft()
                rows.num_samples = 0
                if not rows.trials:
                    rows.best, rows.is_found = self._best_of(rows), True
        elif rows.steps_to_look <= 0:
            rows.trials.extend(self._to_try(rows))
            rows.num_samples, rows.steps_to_look = 0, _LOOK_AGAIN
        elif rows.is_found and rows.num_samples >= _SAMPLES:
            rows.best, rows.num_samples = self._best_of(rows), 0
        self.limit = rows.trials[0] if rows.trials else rows.best

    def _to_try(self, rows: _Rows) -> list[int]:
        """The numbers to try, the largest first: what the later drafts are worth is then known for all others."""
        everything = range(self.most, -1, -1)
        if len(rows.seconds) <= self.most:
            return list(everything)
        return [n for n in everything if abs(n - rows.best) == 1 or (n == self.most != rows.best)]

    def _best_of(self, rows: _Rows) -> int:
        """The smallest number that gives nearly as many tokens a second as any."""
        rates = {n: self.tokens_a_row(n) / median(seconds) for n, seconds in rows.seconds.items()}
        most = max(rates.values())
        return min(n for n, rate in rates.items() if rate * _MARGIN >= most)
