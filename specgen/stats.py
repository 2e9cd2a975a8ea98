"""What happened, as raw counts: of one row's speculation (`SpecStats`) and of a whole run (`RunStats`).

Rates are derived when they are read, never stored. The summary table and `--stats FILE` both come from `RunStats`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# A row whose tail holds this many copies of a piece of at most this many tokens, over at least so many tokens, loops.
_LOOP_REPEATS = 3
_LOOP_MAX_PERIOD = 64
_LOOP_MIN_TOKENS = 24
# Above this share of rows cut at their limit, the summary warns.
_LENGTH_WARNING_SHARE = 0.2


def counted(count: int, noun: str) -> str:
    """Return "1 row", "0 rows", "2,000 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@dataclass(slots=True)
class SpecStats:
    """Counts of speculative steps, of a row or summed over rows.

    steps: steps that gave the row at least one token (the first, which drafts nothing, included).
    drafted: drafts that were proposed and verified, as far as the row had room for them. accepted: the kept prefix of
    them, cut where the row ended.
    emitted: tokens kept; equals the number of token ids of the row.
    accepted_per_pos, drafted_per_pos: the same counts by draft position, 0 first; drafted_per_pos[i] counts the steps
    that had a draft at position i.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafted_per_pos: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one step: so many drafts verified, so many of them kept, so many tokens kept in all."""
        self.observe_steps(num_drafted, [num_accepted], num_emitted)

    def observe_steps(self, num_drafted: int, num_accepted: list[int], num_emitted: int) -> None:
        """Count steps, each with so many drafts verified: of each how many were kept, and the tokens kept in all."""
        num_steps, sum_accepted = len(num_accepted), sum(num_accepted)
        assert min(num_accepted) >= 0 and max(num_accepted) <= num_drafted
        assert sum_accepted <= num_emitted <= sum_accepted + num_steps
        self.steps += num_steps
        self.drafted += num_drafted * num_steps
        self.accepted += sum_accepted
        self.emitted += num_emitted
        self._widen(num_drafted)
        num_with_it = 0  # steps that kept the draft at the position, from the last one down
        for position in range(num_drafted - 1, -1, -1):
            num_with_it += num_accepted.count(position + 1)
            self.accepted_per_pos[position] += num_with_it
            self.drafted_per_pos[position] += num_steps

    def observe_plain(self, num_steps: int) -> None:
        """Count steps that verified no draft, and so kept one token each."""
        self.steps += num_steps
        self.emitted += num_steps

    def add(self, other: "SpecStats") -> None:
        """Add another's counts to these."""
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self._widen(len(other.drafted_per_pos))
        for position, count in enumerate(other.drafted_per_pos):
            self.drafted_per_pos[position] += count
        for position, count in enumerate(other.accepted_per_pos):
            self.accepted_per_pos[position] += count

    def _widen(self, num_positions: int) -> None:
        missing = num_positions - len(self.drafted_per_pos)
        if missing > 0:
            self.drafted_per_pos.extend([0] * missing)
            self.accepted_per_pos.extend([0] * missing)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a step: emitted / steps; 0.0 before any step. 1.0 is plain decoding, 1 + K the most."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified drafts that were kept: accepted / drafted; 0.0 if none was made."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Share kept of the drafts made at each position: accepted_per_pos[i] / drafted_per_pos[i]."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_per_pos, self.drafted_per_pos, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """Return the `spec` object of an output line: the counts, and the mean rounded to 4 digits."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_per_pos": list(self.accepted_per_pos),
            "drafted_per_pos": list(self.drafted_per_pos),
            "mean_accepted_length": round(self.mean_accepted_length, 4),
        }


def is_looping(token_ids: Sequence[int]) -> bool:
    """Return whether the ids end in at least 3 copies of a piece of 1 to 64 tokens, over at least 24 tokens."""
    for period in range(1, _LOOP_MAX_PERIOD + 1):
        window = max(_LOOP_REPEATS * period, _LOOP_MIN_TOKENS)
        if len(token_ids) < window:
            return False
        if token_ids[-1] != token_ids[-1 - period]:
            continue  # nearly always
        tail = token_ids[len(token_ids) - window :]
        if tail[period:] == tail[:-period]:
            return True
    return False


@dataclass(slots=True)
class RunStats:
    """Counts of a run: one `count_row` a finished row, in any order.

    rows: those all of whose samples have ended. samples = ok + failed. empty: samples that finished without any text.
    looping: samples whose tail repeats (`is_looping`).
    wall_seconds: from the first row read to the last line written, model loading excluded.
    sum_mean_accepted: sum over `num_means` rows of their own mean accepted length (for the macro mean).
    engine: what the engine says of itself (steps, seconds in target, sampling and draft, preemptions).
    """

    rows: int = 0
    samples: int = 0
    ok: int = 0
    failed: int = 0
    blank_lines: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    empty: int = 0
    looping: int = 0
    wall_seconds: float = 0.0
    sum_mean_accepted: float = 0.0
    num_means: int = 0
    interrupted: bool = False
    spec: SpecStats = field(default_factory=SpecStats)
    engine: dict[str, object] = field(default_factory=dict)

    def count_row(
        self,
        finish_reason: str,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        token_ids: Sequence[int] = (),
        text: str = "",
        spec: SpecStats | None = None,
        error_code: str | None = None,
        ends_row: bool = True,
    ) -> None:
        """Count one sample that has its output line; `error_code` makes it a failed one."""
        self.rows += ends_row
        self.samples += 1
        self.finish_reasons[finish_reason] += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.completion_tokens += len(token_ids)
        if spec is not None:
            self.spec.add(spec)
            if spec.steps:
                self.sum_mean_accepted += spec.mean_accepted_length
                self.num_means += 1
        if error_code is not None:
            self.failed += 1
            self.error_codes[error_code] += 1
            return
        self.ok += 1
        self.empty += not text.strip()
        # The token that ended the row is no part of what it repeats.
        self.looping += is_looping(token_ids[:-1] if finish_reason == "stop" else token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of `wall_seconds`; 0.0 before any time has passed."""
        return self.completion_tokens / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def micro_mean_accepted_length(self) -> float:
        """Mean accepted length over all steps of all rows: long rows weigh more."""
        return self.spec.mean_accepted_length

    @property
    def macro_mean_accepted_length(self) -> float:
        """Mean over rows of each row's mean accepted length: every row weighs the same; 0.0 without rows."""
        return self.sum_mean_accepted / self.num_means if self.num_means else 0.0

    def warnings(self) -> list[str]:
        """Return what a reader of the output should know before using it, one sentence each."""
        found = []
        cut = self.finish_reasons["length"]
        if cut > _LENGTH_WARNING_SHARE * self.samples:
            found.append(f"{cut} of {self.samples} answers were cut at their token limit: raise sampling.max_tokens")
        if self.empty:
            found.append(f"{counted(self.empty, 'row')} gave an empty answer")
        if self.looping:
            found.append(f"{counted(self.looping, 'row')} ended in a loop (the same few tokens over and over)")
        if self.failed:
            codes = ", ".join(f"{code} × {count}" for code, count in sorted(self.error_codes.items()))
            found.append(f"{counted(self.failed, 'row')} failed: {codes}")
        return found

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values: the content of `--stats FILE`."""
        return {
            "rows": self.rows,
            "samples": self.samples,
            "ok": self.ok,
            "failed": self.failed,
            "blank_lines": self.blank_lines,
            "interrupted": self.interrupted,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "error_codes": dict(sorted(self.error_codes.items())),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
            "empty": self.empty,
            "looping": self.looping,
            "wall_seconds": round(self.wall_seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "spec": {
                **self.spec.as_dict(),
                "acceptance_rate": round(self.spec.acceptance_rate, 4),
                "acceptance_per_pos": [round(rate, 4) for rate in self.spec.acceptance_per_pos],
                "mean_accepted_length_micro": round(self.micro_mean_accepted_length, 4),
                "mean_accepted_length_macro": round(self.macro_mean_accepted_length, 4),
            },
            "engine": self.engine,
            "warnings": self.warnings(),
        }
