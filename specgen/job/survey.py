"""What a run would meet: every row looked at, none of them run.

Knows counts, lengths and reasons. Prints nothing and loads no weights.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specgen.errors import RowError
from specgen.job.plan import Plan
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row


@dataclass(slots=True)
class Survey:
    """Counts over all rows.

    rows = ok + bad. samples: answers that rows ask for. truncated: rows whose prompt is cut. prompt_tokens: of all
    prompts, each counted once. lengths: rows by tokens of their prompt. error_codes: rows that cannot run, by reason.
    longest: tokens that the `num_at_once` longest samples can have together, prompt and answer: what the KV pool must
    hold for none of them ever to wait.
    """

    num_at_once: int
    rows: int = 0
    ok: int = 0
    samples: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    _longest: list[int] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Rows that cannot run."""
        return self.error_codes.total()

    @property
    def longest(self) -> int:
        """See the class."""
        return sum(self._longest)

    def add(self, num_prompt: int, num_answer: int, num_samples: int) -> None:
        """Count a row that can run, with so many tokens in its prompt and at most so many in each answer."""
        self.ok += 1
        self.prompt_tokens += num_prompt
        self.samples += num_samples
        self.lengths[num_prompt] += 1
        for _ in range(min(num_samples, self.num_at_once)):
            heapq.heappush(self._longest, num_prompt + num_answer)
            if len(self._longest) > self.num_at_once:
                heapq.heappop(self._longest)

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (from, to, rows) of prompt lengths, each range twice as wide as the one before."""
        bins: Counter[int] = Counter()
        for length, count in self.lengths.items():
            bins[(length - 1).bit_length()] += count
        low, high = min(bins, default=0), max(bins, default=-1)
        return [((1 << power >> 1) + 1, 1 << power, bins[power]) for power in range(low, high + 1)]


def survey(
    plans: Iterable[Plan],
    prompts: PromptBuilder,
    *,
    max_model_len: int,
    num_at_once: int,
    on_bad: Callable[[Row | BadRow, RowError], None],
    on_row: Callable[[Survey], None] = lambda found: None,
) -> Survey:
    """Return what is found in all rows; `on_bad` is told each that cannot run, `on_row` after each what is found."""
    found = Survey(num_at_once)
    for plan, prompt in prompts.build_all(plans):
        found.rows += 1
        if isinstance(prompt, RowError):
            found.error_codes[prompt.code] += 1
            on_bad(plan.row, prompt)
        else:
            room = max_model_len - len(prompt.token_ids)
            found.truncated += prompt.truncated_from is not None
            found.add(len(prompt.token_ids), min(room, prompt.params.max_tokens or room), len(plan.samples))
        on_row(found)
    return found
