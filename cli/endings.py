"""How a command ends that is broken off; and the last word on stderr."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from specgen.cli import codes


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """End a command with our exit code where typer has its own: for an interruption, and a reader who left.

    Put on the whole command: its imports take long enough to be interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        to_stderr("interrupted")
        raise typer.Exit(codes.INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(codes.INTERRUPTED) from None


def to_stderr(text: str) -> None:
    """Print a line, if anybody listens: nothing ends because nobody does."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
