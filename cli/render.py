"""What a person sees while and after a job runs, on stderr; and `to_stdout`, the one way there for data."""

import contextlib
import sys

import rich.console
from rich.console import RenderableType
from rich.table import Table

from specgen.errors import InputError
from specgen.stats import RunStats, SpecStats

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


class PlainConsole(rich.console.Console):
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
        self.rich = PlainConsole(stderr=True)

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


def show_summary(console: Console, stats: RunStats, output_path: str, *, before: str | None = None) -> None:
    """Print what a run did, then its warnings. before: what earlier runs of the same output did."""
    if not console.quiet:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        if before is not None:
            table.add_row("before", before)
        answers = f"{stats.samples} answers: " if stats.samples != stats.rows else ""
        table.add_row("rows", f"{stats.rows} ({answers}{stats.ok} ok, {stats.failed} failed)")
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
        for label, bar in acceptance_bars(stats.spec):
            table.add_row(label, bar)
        if isinstance(lengths := stats.engine.get("draft_lengths"), dict) and lengths:
            paid = ", ".join(f"{drafts} with up to {rows}" for rows, drafts in lengths.items())
            table.add_row("drafts that paid", f"{paid} rows at once")
        table.add_row("output", "stdout" if output_path == "-" else output_path)
        console.show(table)
    for warning in stats.warnings():
        console.warn(warning)


def acceptance_bars(spec: SpecStats) -> list[tuple[str, str]]:
    """Return a label and a bar for each draft position: the share kept of the drafts made there."""
    bars = []
    for position, rate in enumerate(spec.acceptance_per_pos):
        full = round(rate * _BAR_WIDTH)
        counts = f"{spec.accepted_per_pos[position]:,} of {spec.drafted_per_pos[position]:,}"
        bars.append((f"draft {position + 1}", f"{'█' * full}{'░' * (_BAR_WIDTH - full)} {rate:6.1%}  {counts}"))
    return bars
