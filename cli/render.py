"""What a person sees while and after a job runs, on stderr; and `to_stdout`, the one way there for data."""

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specgen.errors import InputError
from specgen.stats import RunStats, SpecStats, counted

if TYPE_CHECKING:  # they bring the engine's modules
    from specgen.job.bench import BenchResult, Side
    from specgen.job.job import Progress as JobProgress

# Without a terminal: seconds between two lines of progress.
_LINE_SECONDS = 5.0
_BAR_WIDTH = 30


def to_stdout(text: str) -> None:
    """Write text to stdout and flush it; what its encoding does not have is written as escapes.

    Raises: InputError if stdout is closed or full, BrokenPipeError if its reader has left.
    """
    if sys.stdout is None:
        raise InputError("stdout is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"writing to stdout failed: {error.strerror}") from None


class _PlainConsole(rich.console.Console):
    """Shows texts as they are: a path with [brackets] or :colons: is no markup."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Go on in silence: a job does not end because nobody watches it."""
        self.quiet = True


class Console:
    """Stderr, for people. quiet: warnings only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = _PlainConsole(stderr=True)

    def note(self, text: str) -> None:
        """Say what is being done."""
        if not self.quiet:
            self.show(text, style="dim")

    def warn(self, text: str) -> None:
        """Say what the user should know in any case."""
        self.show(f"warning: {text}", style="yellow")

    def show(self, content: RenderableType, *, style: str | None = None) -> None:
        """Print a text or a table, if anybody can see it."""
        with contextlib.suppress(OSError):
            self.rich.print(content, style=style, soft_wrap=isinstance(content, str))


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
            self._console.note(f"rows done: {progress.rows_done}{of_total}, {_progress_text(progress)}")

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
        console.show(table)
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
    """Print the benchmark's figures: both sides, acceptance, speed-up, and whether the tokens were the same.

    Raises: InputError, BrokenPipeError if stdout does not take them.
    """
    from specgen.job.bench import BENCH_PARTS

    title = [(result.rows, "row"), (result.prompt_tokens, "prompt token"), (len(result.plain.rounds), "round")]
    table = Table(title=", ".join(counted(count, noun) for count, noun in title))
    table.add_column("")
    sides: list[Side] = [result.plain, result.speculative]
    for side in sides:
        table.add_column(counted(side.num_tokens, "draft") if side.num_tokens else "plain", justify="right")
    table.add_row("output tokens/s", *(f"{side.tokens_per_second:,.0f}" for side in sides))
    table.add_row("tokens a step and row", *(f"{side.spec.mean_accepted_length:.2f}" for side in sides))
    for part in BENCH_PARTS:
        if any(side.ms_per_step(part) for side in sides):
            table.add_row(f"ms a step, {part}", *(f"{side.ms_per_step(part):.2f}" for side in sides))
    bars = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, bar in _acceptance_bars(result.speculative.spec):
        bars.add_row(label, bar)
    different = result.num_different_rows
    same = "the same" if not different else f"DIFFER in {different} of {counted(result.rows, 'row')}"
    contents: list[RenderableType] = [table, bars, f"speed-up: {result.speedup:.2f}×", f"token ids: {same}"]
    if result.peer is not None:
        best = result.peer.tokens_per_second[result.peer.best_batch_size]
        ratios = " and ".join(f"{side.tokens_per_second / best:.2f}×" for side in sides)
        contents.append(
            f"transformers generate: {best:,.0f} tokens/s at its best batch size, {result.peer.best_batch_size}; "
            f"plain and speculative are {ratios} that; {result.num_rows_like_peer} of {result.rows} rows have its ids"
        )
    console = _PlainConsole(stderr=to_stderr)
    with console.capture() as captured:
        for content in contents:
            console.print(content)
    if to_stderr:
        with contextlib.suppress(OSError):
            print(captured.get(), end="", file=sys.stderr)
    else:
        to_stdout(captured.get())
