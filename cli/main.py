"""The `specgen` command: its sub-commands, and the one place where errors become a message and an exit code.

Exit codes: 0 done, 1 our bug, 2 recipe or input wrong, 3 finished with failed rows (verify: with near-ties only),
4 verify found a real difference, 130 interrupted (by SIGINT, or because nobody reads stdout any more), 143 by SIGTERM.
Imports nothing heavy: each command imports what it needs when it runs.
"""

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from specgen import __version__
from specgen.cli import codes, job_commands, model_commands
from specgen.cli.endings import to_stderr
from specgen.errors import EngineError, SpecgenError

logger = logging.getLogger("specgen")

app = typer.Typer(
    help="Turns a file of prompts into a file of answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(job_commands.run)
app.command()(job_commands.check)
app.command()(job_commands.merge)
app.command()(job_commands.report)
app.command()(model_commands.inspect)
app.command(epilog=model_commands.BENCH_COLUMNS)(model_commands.bench)
app.command()(model_commands.profile)
app.command(epilog=model_commands.VERIFY_RULE)(model_commands.verify)
app.command(epilog=model_commands.ACCEPTANCE_WAYS)(model_commands.acceptance)


class _WarningHandler(logging.Handler):
    """Shows what is logged as the console shows warnings; of other packages, and of what is no warning, with its name.

    Writes to whatever sys.stderr is at the time: a live view stands in for it while it is shown.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        from specgen.cli.render import PlainConsole

        is_ours = record.name.partition(".")[0] == "specgen" and record.levelno >= logging.WARNING
        source = "" if is_ours else f"{record.name}: "
        console = PlainConsole(stderr=True)
        with console.capture() as shown:
            text = f"{record.levelname.lower()}: {source}{self.format(record)}"
            console.print(text, style="yellow", soft_wrap=True)
        to_stderr(shown.get().rstrip("\n"))


def _set_up_logging(*, debug: bool) -> None:
    logging.basicConfig(handlers=[_WarningHandler()], format="%(message)s", level=logging.WARNING, force=True)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit()


@app.callback()
def specgen(
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Turns a file of prompts into a file of answers. The text never depends on how fast it was made."""
    _set_up_logging(debug=debug)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing else in specgen turns errors into messages."""
    _occupy_closed_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a help text has signs that not every encoding has
    code = _run_app(args)
    for stream in (sys.stdout, sys.stderr):
        _settle(stream)
    return code


def _run_app(args: Sequence[str] | None) -> int:
    try:
        app(args=None if args is None else list(args), prog_name="specgen")
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # typer's own output, a help text say, had no reader
            return codes.INTERRUPTED
        return done.code if isinstance(done.code, int) else codes.OK
    except KeyboardInterrupt:
        return codes.INTERRUPTED
    except EngineError as error:
        _show_error(error, str(error))
        return codes.BUG
    except SpecgenError as error:
        _show_error(error, str(error))
        return codes.WRONG
    except Exception as error:
        _show_error(error, f"internal error, {type(error).__name__}: {error}")
        if not logger.isEnabledFor(logging.DEBUG):
            to_stderr("This is a bug in specgen. Its traceback: specgen --debug, then the same command.")
        return codes.BUG
    return codes.OK


def _show_error(error: Exception, text: str) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        to_stderr("".join(traceback.format_exception(error)))
    to_stderr(f"error: {text}")


def _occupy_closed_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr are closed, or the next file opened would become one of them."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one


def _settle(stream: TextIO | None) -> None:
    """Drop what a stream still holds and nobody takes, or Python would try again, and complain, when it exits."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
