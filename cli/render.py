"""What a person sees while and after a job runs: all of it on stderr, except the benchmark's table."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specgen.stats import RunStats, SpecStats

if TYPE_CHECKING:  # they bring the engine's modules
    from specgen.job.bench import BenchResult, Side
    from specgen.job.job import Progress as JobProgress

# Without a terminal: seconds between two lines of progress.
_LINE_SECONDS = 5.0
_BAR_WIDTH = 30


class Console:
    """Stderr, for people. quiet: warnings only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = rich.console.Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Say what is being done."""
        if not self.quiet:
            self.rich.print(text, style="dim", markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Say what the user should know in any case."""
        self.rich.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)


class ProgressView:
    """Shows a job's progress while it is entered: a bar on a terminal, a line every few seconds elsewhere.

    total: rows, None if that is not known. shares_terminal: lines of data appear there too, so no bar is drawn.
    """

    def __init__(self, console: Console, total: int | None, *, shares_terminal: bool = False) -> None:
        self._console = console
        self._total = total
        self._last_line = time.perf_counter()
        self._bar: Progress | None = None
        if console.rich.is_terminal and not console.quiet and not shares_terminal:
            self._bar = Progress(
                BarColumn(bar_width=_BAR_WIDTH),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console.rich,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total)

    def update(self, progress: "JobProgress") -> None:
        """Show where the job stands; called often, so it does little."""
        if self._console.quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.rows_done, description=_progress_text(progress))
            return
        now = time.perf_counter()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            of_total = f" of {self._total}" if self._total is not None else ""
            self._console.note(f"{progress.rows_done}{of_total} rows, {_progress_text(progress)}")

    def __enter__(self) -> "ProgressView":
        """Start showing."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _progress_text(progress: "JobProgress") -> str:
    rate = progress.completion_tokens / progress.seconds if progress.seconds else 0.0
    parts = [f"{rate:,.0f} tokens/s", f"{progress.running} running", f"{progress.waiting} waiting"]
    if progress.mean_accepted_length:
        parts.insert(1, f"{progress.mean_accepted_length:.2f} tokens/step")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    return ", ".join(parts)


def show_summary(console: Console, stats: RunStats, output_path: str) -> None:
    """Print what a run did, then its warnings."""
    if not console.quiet:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_row("rows", f"{stats.rows} ({stats.ok} ok, {stats.failed} failed)")
        table.add_row("finish", ", ".join(f"{k} {v}" for k, v in sorted(stats.finish_reasons.items())) or "none")
        table.add_row(
            "tokens",
            f"{stats.completion_tokens:,} out, {stats.prompt_tokens:,} in ({stats.cached_tokens:,} from prefix cache)",
        )
        table.add_row("speed", f"{stats.tokens_per_second:,.0f} output tokens/s over {stats.wall_seconds:.1f} s")
        if stats.spec.steps:
            table.add_row(
                "accepted length",
                f"{stats.micro_mean_accepted_length:.2f} tokens a step"
                f" ({stats.macro_mean_accepted_length:.2f} as a mean over rows)",
            )
        for label, bar in _acceptance_bars(stats.spec):
            table.add_row(label, bar)
        table.add_row("output", "stdout" if output_path == "-" else output_path)
        console.rich.print(table)
    for warning in stats.warnings():
        console.warn(warning)


def _acceptance_bars(spec: SpecStats) -> list[tuple[str, str]]:
    """Return a label and a bar for each draft position: the share kept of the drafts made there."""
    bars = []
    for position, rate in enumerate(spec.acceptance_per_pos):
        full = round(rate * _BAR_WIDTH)
        counts = f"{spec.accepted_per_pos[position]:,} of {spec.drafted_per_pos[position]:,}"
        bars.append((f"draft {position + 1}", f"{'█' * full}{'░' * (_BAR_WIDTH - full)} {rate:6.1%}  {counts}"))
    return bars


def show_bench(result: "BenchResult", *, to_stderr: bool) -> None:
    """Print the benchmark's figures: both sides, acceptance, speed-up, and whether the tokens were the same."""
    from specgen.job.bench import BENCH_PARTS

    console = rich.console.Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False)
    table = Table(
        title=f"{result.rows} rows, {result.prompt_tokens:,} prompt tokens, {len(result.plain.rounds)} rounds"
    )
    table.add_column("")
    sides: list[Side] = [result.plain, result.speculative]
    for side in sides:
        table.add_column(f"{side.num_tokens} drafts" if side.num_tokens else "plain", justify="right")
    table.add_row("output tokens/s", *(f"{side.tokens_per_second:,.0f}" for side in sides))
    table.add_row("tokens a step and row", *(f"{side.spec.mean_accepted_length:.2f}" for side in sides))
    for part in BENCH_PARTS:
        if any(side.ms_per_step(part) for side in sides):
            table.add_row(f"ms a step, {part}", *(f"{side.ms_per_step(part):.2f}" for side in sides))
    console.print(table)
    bars = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, bar in _acceptance_bars(result.speculative.spec):
        bars.add_row(label, bar)
    console.print(bars)
    console.print(f"speed-up: {result.speedup:.2f}×")
    different = result.num_different_rows
    console.print("token ids: the same" if not different else f"token ids: {different} of {result.rows} rows DIFFER")
