"""What a person, or a program, sees while something runs: a live view on a terminal, lines elsewhere, or JSON lines."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specgen.cli.endings import to_stderr
from specgen.cli.render import Console, acceptance_bars

if TYPE_CHECKING:  # they bring the engine's modules
    from specgen.job.job import Progress
    from specgen.job.session import Session

# Seconds between two lines of progress; of the live view; and over which the speed "now" is taken.
_LINE_SECONDS = 5.0
_VIEW_SECONDS = 0.25
_NOW_SECONDS = 10.0
_BAR_WIDTH = 30


class Shown(NamedTuple):
    """Where something stands: as plain JSON values, as a line of text, and as a table."""

    figures: dict[str, object]
    line: str
    panel: RenderableType


class Display:
    """Shows where something stands while it is entered.

    mode: `auto` is a live view on a terminal and a line every few seconds elsewhere, `lines` is lines anywhere, `json`
    a JSON object a line, and one at the end, `none` nothing. shares_terminal: lines of data appear there too, so no
    view is drawn.
    """

    def __init__(self, console: Console, mode: str, *, shares_terminal: bool = False) -> None:
        self._console = console
        self._mode = "none" if console.quiet and mode == "auto" else mode
        self._last_shown = time.perf_counter()
        self._last: Callable[[], Shown] | None = None
        self._live: Live | None = None
        is_screen = console.rich.is_terminal and not console.rich.is_dumb_terminal
        if self._mode == "auto" and is_screen and not shares_terminal:
            self._live = Live(console=console.rich, transient=True, auto_refresh=False)

    def update(self, look: Callable[[], Shown]) -> None:
        """Show what `look` returns, if it is time to; called often, so it does little."""
        self._last = look
        now = time.perf_counter()
        interval = _VIEW_SECONDS if self._live is not None else _LINE_SECONDS
        if self._mode == "none" or now - self._last_shown < interval:
            return
        self._last_shown = now
        shown = look()
        if self._live is not None:
            self._live.update(shown.panel, refresh=True)
        elif self._mode == "json":
            to_stderr(json.dumps({"event": "progress", **shown.figures}))
        else:
            self._console.show(shown.line, style="dim")

    def __enter__(self) -> "Display":
        """Start showing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the view away; programs are told where it ended."""
        if self._live is not None:
            self._live.stop()
        if self._mode == "json" and self._last is not None:
            to_stderr(json.dumps({"event": "end", **self._last().figures}))


class JobFigures:
    """What there is to show of a job: see `shown`."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._recent: deque[tuple[float, int]] = deque()

    def shown(self, progress: "Progress") -> Shown:
        """Return where the job stands."""
        figures = self._figures(progress)
        return Shown(figures, _line(figures, progress), _panel(figures, progress))

    def _figures(self, progress: "Progress") -> dict[str, object]:
        self._recent.append((progress.seconds, progress.completion_tokens))
        while len(self._recent) > 2 and progress.seconds - self._recent[0][0] > _NOW_SECONDS:
            self._recent.popleft()
        first_seconds, first_tokens = self._recent[0]
        passed = progress.seconds - first_seconds
        mean = progress.completion_tokens / progress.seconds if progress.seconds else 0.0
        rate = (progress.completion_tokens - first_tokens) / passed if passed > 0 else mean
        counts, sampling, rows_total = self._session.counts, self._session.recipe.sampling, self._session.total
        num_left = None if rows_total is None else max(0, rows_total - counts.skipped - progress.rows_done)
        spec = progress.spec
        return {
            "seconds": round(progress.seconds, 3),
            "rows": progress.rows_done + counts.skipped,
            "rows_total": rows_total,
            "rows_done_before": counts.skipped,
            "samples": progress.samples_done,
            "failed": progress.failed,
            "error_codes": dict(sorted(progress.error_codes.items())),
            "tokens": progress.completion_tokens,
            "tokens_per_second": round(rate, 1),
            "tokens_per_second_mean": round(mean, 1),
            "eta_seconds": _eta(progress, num_left, sampling.n, sampling.max_tokens, rate),
            "running": progress.running,
            "waiting": progress.waiting,
            "kv_usage": round(progress.kv_usage, 4) if progress.kv_usage is not None else None,
            "mean_accepted_length": round(progress.mean_accepted_length, 4),
            "acceptance_per_pos": [round(rate, 4) for rate in spec.acceptance_per_pos],
        }


def _eta(progress: "Progress", num_left: int | None, samples_a_row: int, most: int | None, rate: float) -> float | None:
    """Return the seconds left: tokens that are still to come, at the speed of now.

    An answer's mean length is taken to be all tokens so far over the answers that have ended (which alone are the
    short ones at first), `most` at most. num_left: rows that have not ended.
    """
    if num_left is None or not progress.samples_done or rate <= 0:
        return None
    length = min(progress.completion_tokens / progress.samples_done, most or float("inf"))
    begun = progress.completion_tokens - progress.finished_tokens
    return round(max(0.0, num_left * samples_a_row * length - begun) / rate, 1)


def _line(figures: dict[str, object], progress: "Progress") -> str:
    of_total = f" of {figures['rows_total']:,}" if figures["rows_total"] is not None else ""
    parts = [
        f"rows done: {figures['rows']:,}{of_total}",
        f"{figures['tokens_per_second']:,.0f} tokens/s",
        f"{figures['mean_accepted_length']:.2f} tokens/step",
        f"{figures['running']:,} running",
        f"{figures['waiting']:,} waiting",
    ]
    if figures["eta_seconds"] is not None:
        parts.append(f"{duration(figures['eta_seconds'])} left")
    if progress.failed:
        parts.append(failures(progress.error_codes))
    return ", ".join(parts)


def failures(counts: Mapping[str, int]) -> str:
    """Return how many failed, and of what."""
    codes = ", ".join(f"{code} × {count:,}" for code, count in sorted(counts.items()))
    return f"{sum(counts.values()):,} failed" + (f" ({codes})" if codes else "")


def _panel(figures: dict[str, object], progress: "Progress") -> Group:
    total = figures["rows_total"]
    done = int(str(figures["rows"]))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH) if isinstance(total, int) else Text("")
    of_total = f"{done:,} of {total:,}" if isinstance(total, int) else f"{done:,}"
    eta = figures["eta_seconds"]
    left = f", {duration(eta)} left" if eta is not None else ""
    table.add_row("rows", bar, f"{of_total}, {duration(progress.seconds)}{left}")
    samples = f"{progress.samples_done:,} answers, " if progress.samples_done != progress.rows_done else ""
    table.add_row("", "", f"{samples}{failures(progress.error_codes)}")
    table.add_row(
        "tokens/s",
        f"{figures['tokens_per_second']:,.0f} now",
        f"{figures['tokens_per_second_mean']:,.0f} mean, {progress.completion_tokens:,} in all",
    )
    kv = "" if progress.kv_usage is None else f"KV {progress.kv_usage:.0%}"
    table.add_row("engine", f"{progress.running:,} running, {progress.waiting:,} waiting", kv)
    if progress.spec.drafted:
        table.add_row("accepted", f"{progress.mean_accepted_length:.2f} tokens a step")
        for label, shown in acceptance_bars(progress.spec):
            table.add_row(label, Text(shown[:_BAR_WIDTH]), shown[_BAR_WIDTH:].strip())
    return Group(table)


def duration(seconds: object) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    total = int(float(str(seconds)))
    hours, minutes = total // 3600, total // 60 % 60
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"
