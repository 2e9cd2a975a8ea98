"""The `specgen` command: its sub-commands, and the one place where errors become a message and an exit code.

Exit codes: 0 done, 1 our bug, 2 recipe or input wrong, 3 finished with failed rows (verify: with near-ties only),
4 verify found a real difference, 130 interrupted (by a signal, or because nobody reads stdout any more).
Imports nothing heavy: each command imports what it needs when it runs.
"""

import contextlib
import enum
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from specgen import __version__
from specgen.cli import codes
from specgen.errors import EngineError, SpecgenError

logger = logging.getLogger("specgen")

app = typer.Typer(
    help="Turns a file of prompts into a file of answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)]
InputFile = Annotated[
    str | None, typer.Argument(help="Rows to run instead of the recipe's input.path; - is stdin.", show_default=False)
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key of the recipe; may be repeated."),
]

_VERIFY_RULE = (
    "A difference is a near-tie if both sides' logits there differ by no more than rounding does, 20 tolerances, and"
    " the gap between the two tokens' scores is at most 4 times what they differ by, or at most the tolerance (0.0001"
    " in float32, 0.05 in bfloat16); or if, for such logits, a filter like top-p kept a token on one side only."
    " Exit codes: 0 the same tokens in every row, 3 near-ties only, 4 a real difference."
)


class Against(enum.Enum):
    """What `specgen verify` compares with."""

    PLAIN = "plain"
    TRANSFORMERS = "transformers"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to whatever sys.stderr is at the time: a progress bar stands in for it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if sys.stderr is not None:
            self.stream = sys.stderr
            super().emit(record)


def _set_up_logging(*, debug: bool) -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit()


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """End a command with our exit code where typer has its own: for an interruption, and a reader who left."""
    try:
        yield
    except KeyboardInterrupt:
        _to_stderr("interrupted")
        raise typer.Exit(codes.INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(codes.INTERRUPTED) from None


@app.callback()
def specgen(
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Turns a file of prompts into a file of answers. The text never depends on how fast it was made."""
    _set_up_logging(debug=debug)


@app.command()
def run(
    recipe: RecipeFile,
    input_path: InputFile = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Where the answers go instead of output.path; - is stdout.")
    ] = None,
    sets: Sets = None,
    stats: Annotated[
        Path | None,
        typer.Option(help="Write the run's statistics there, as JSON (an old file is replaced); - is stdout."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move an old output file, and its recipe, aside: to NAME.old.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary; warnings stay.")] = False,
) -> None:
    """Run a recipe: one output line for every input row, whatever happened to it."""
    from specgen.cli.run import run_recipe

    with _exit_codes():
        code = run_recipe(
            recipe, input_path, output=output, sets=sets or (), stats_path=stats, overwrite=overwrite, quiet=quiet
        )
    raise typer.Exit(code)


@app.command()
def check(recipe: RecipeFile, input_path: InputFile = None, sets: Sets = None) -> None:
    """Show the resolved recipe with each value's origin, and look at model and rows without loading weights."""
    from specgen.cli.check import check_recipe

    with _exit_codes():
        code = check_recipe(recipe, input_path, sets=sets or ())
    raise typer.Exit(code)


@app.command()
def bench(
    num_spec_tokens: Annotated[
        int | None, typer.Option("--num-spec-tokens", "-k", help="Drafts a step. [default: the recipe's, or 3]")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe to measure. [default: the bundled model and prompts]")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the input to use.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer. [default: the recipe's, or 128]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side; medians are shown.")] = 3,
    temperature: Annotated[float | None, typer.Option(help="Temperature. [default: the recipe's, or 0]")] = None,
    with_peer: Annotated[
        bool, typer.Option("--peer", help="Run the rows through transformers' generate too (greedy rows only).")
    ] = False,
    sets: Sets = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the figures there, as JSON (an old file is replaced); - is stdout.",
        ),
    ] = None,
) -> None:
    """Measure plain against speculative decoding, on the same rows and in one run."""
    from specgen.cli.bench import bench_recipe

    flags = {
        "speculation.num_tokens": num_spec_tokens,
        "sampling.max_tokens": max_tokens,
        "sampling.temperature": temperature,
    }
    overrides = {key: value for key, value in flags.items() if value is not None}
    with _exit_codes():
        bench_recipe(
            recipe,
            overrides,
            sets=sets or (),
            num_rows=rows,
            num_rounds=rounds,
            json_path=json_path,
            with_peer=with_peer,
        )


@app.command(epilog=_VERIFY_RULE)
def verify(
    recipe: RecipeFile,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the input to use.")] = 32,
    against: Annotated[
        Against,
        typer.Option(
            help="plain: no drafts, no prefix cache, one row at a time. transformers: its greedy tokens (greedy rows"
            " only)."
        ),
    ] = Against.PLAIN,
    sets: Sets = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the result there, as JSON (an old file is replaced); - is stdout."
        ),
    ] = None,
) -> None:
    """Compare the tokens of a recipe's run with a plainer way to compute them; show each row's first difference."""
    from specgen.cli.verify import verify_recipe

    with _exit_codes():
        code = verify_recipe(recipe, against=against.value, sets=sets or (), num_rows=rows, json_path=json_path)
    raise typer.Exit(code)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing else in specgen turns errors into messages."""
    _occupy_closed_descriptors()
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
            _to_stderr("This is a bug in specgen. Its traceback: specgen --debug, then the same command.")
        return codes.BUG
    return codes.OK


def _show_error(error: Exception, text: str) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        _to_stderr("".join(traceback.format_exception(error)))
    _to_stderr(f"error: {text}")


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody may be listening
            print(text, file=sys.stderr, flush=True)


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
