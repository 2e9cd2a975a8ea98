"""The `specgen` command: its sub-commands, and the one place where errors become a message and an exit code.

Exit codes: 0 done, 1 our bug, 2 recipe or input wrong, 3 finished with failed rows (verify: with near-ties only),
4 verify found a real difference, 130 interrupted (by SIGINT, or because nobody reads stdout any more), 143 by SIGTERM.
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
_BENCH_COLUMNS = (
    "tokens/s: output tokens over the wall time of a round, prompts included; × K=0: that over plain decoding's."
    " tokens a step: that a row gains. All further columns are of a decode step with all rows: ms a step, from the"
    " start of one to the start of the next; target, sampling (verification included) and draft, its parts; gap, the"
    " time between two steps. On a GPU such a step is one CUDA graph, and the parts come from events within the graph,"
    " in a pass of its own. floor: ms that the step's weights, KV and arithmetic need at this machine's speed, which is"
    " measured first by a large copy and a large product; of floor: floor over ms a step. GB/s and TFLOP/s: what the"
    " step must read and compute over ms a step."
)


_ACCEPTANCE_WAYS = (
    "shared: drafts with the target's own noise, judged strictly, as a run has them. unprocessed: the same, but"
    " penalties and filters do not act on drafts (only shown if a row has any). argmax: the draft layer's likeliest"
    " tokens, judged strictly. ratio: speculation.method: ratio."
)


class Against(enum.Enum):
    """What `specgen verify` compares with."""

    PLAIN = "plain"
    TRANSFORMERS = "transformers"


class ProgressMode(enum.Enum):
    """How `specgen run` shows where it stands."""

    AUTO = "auto"
    LINES = "lines"
    JSON = "json"
    NONE = "none"


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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: move an old output, and what is beside it, to NAME.old.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run rows again that failed before.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run the I-th of N parts of the rows, into NAME.I-of-N.jsonl; `specgen merge` puts them together.",
        ),
    ] = None,
    stats: Annotated[
        Path | None,
        typer.Option(help="Write the run's statistics there, as JSON (an old file is replaced); - is stdout."),
    ] = None,
    progress: Annotated[
        ProgressMode,
        typer.Option(
            help="auto: a live view on a terminal, a line every 5 seconds elsewhere. lines: those anywhere. json: an"
            " object every 5 seconds. All on stderr."
        ),
    ] = ProgressMode.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary; warnings stay.")] = False,
) -> None:
    """Run a recipe, or what an earlier run left: one output line for every answer, whatever happened to the row."""
    from specgen.cli.run import RunFlags, run_recipe

    flags = RunFlags(
        stats_path=stats, fresh=fresh, retry_failed=retry_failed, shard=shard, quiet=quiet, progress=progress.value
    )
    with _exit_codes():
        code = run_recipe(recipe, input_path, output, sets or (), flags)
    raise typer.Exit(code)


@app.command()
def merge(
    output: Annotated[str, typer.Argument(help="The output to make, as NAME.jsonl.", show_default=False)],
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="The shards' outputs. [default: all NAME.I-of-N.jsonl beside it]", show_default=False),
    ] = None,
) -> None:
    """Put the outputs of `run --shard` together, in the order of the input, checked for gaps and doubles."""
    from specgen.cli.merge import merge_outputs

    with _exit_codes():
        code = merge_outputs(output, parts or ())
    raise typer.Exit(code)


@app.command()
def report(
    output: Annotated[str, typer.Argument(help="An output of `specgen run`.", show_default=False)],
    page: Annotated[
        str | None,
        typer.Option(
            "--page",
            "-o",
            metavar="FILE",
            help="Where the HTML page goes; - is stdout. [default: OUTPUT.html, without --json]",
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the same figures there, as JSON; - is stdout."),
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Slice the figures by a column of the input; repeatable.")
    ] = None,
) -> None:
    """Show what an output says about its run: acceptance, lengths, endings, failures, the manifest; one HTML page."""
    from specgen.cli.report import report_output

    with _exit_codes():
        code = report_output(output, page=page, json_path=json_path, by=by or ())
    raise typer.Exit(code)


@app.command()
def check(recipe: RecipeFile, input_path: InputFile = None, sets: Sets = None) -> None:
    """Show the resolved recipe with each value's origin, and look at model and rows without loading weights."""
    from specgen.cli.check import check_recipe

    with _exit_codes():
        code = check_recipe(recipe, input_path, sets=sets or ())
    raise typer.Exit(code)


@app.command(epilog=_BENCH_COLUMNS)
def bench(
    num_spec_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-spec-tokens",
            "-k",
            metavar="K[,K…]",
            help="Drafts a step; several are measured one after another. Without --shape, plain decoding (0) is always"
            " among them. [default: 0 and the recipe's, or 3]",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe to measure. [default: the bundled model and prompts]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="model.path, over the recipe's: a bundled name, a folder, a hub id."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="A config.json; with --random-weights, in place of a model's folder."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Fill the model of --config with random weights, at a real scale."),
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWSxINxOUT",
            help="Rows at once, prompt tokens, answer tokens: prompts of random ids in place of a file's rows, no"
            " prefix cache, temperature 1. May be repeated, or a list with commas. [with --random-weights: 32x512x256]",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="R1,R2,…",
            help="Accept drafts by lot: R1 is the share of steps that keep the first draft, R2 the first two, …",
        ),
    ] = None,
    exactness: Annotated[str | None, typer.Option(help="engine.exactness. [default: the recipe's, or exact]")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the input to use.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer. [default: the recipe's, or 128]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side; medians are shown.")] = 3,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature. [default: the recipe's, or 0; 1 with --shape]")
    ] = None,
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
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of some steady decode steps there, for Perfetto (.json or .json.gz); with several"
            " shapes or K's, one beside it for each.",
        ),
    ] = None,
) -> None:
    """Measure plain against speculative decoding, on the same rows and in one run."""
    from specgen.cli.bench import BenchFlags, bench_recipe

    keys = {"sampling.max_tokens": max_tokens, "sampling.temperature": temperature, "engine.exactness": exactness}
    flags = BenchFlags(
        recipe_path=recipe,
        model=model,
        config=config,
        random_weights=random_weights,
        shapes=shape or (),
        num_spec_tokens=num_spec_tokens,
        acceptance=synthetic_acceptance,
        sets=sets or (),
        num_rows=rows,
        num_rounds=rounds,
        json_path=json_path,
        trace_path=trace,
        with_peer=with_peer,
    )
    with _exit_codes():
        bench_recipe(flags, {key: value for key, value in keys.items() if value is not None})


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="The model: a bundled name, a folder, a hub id.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="A config.json; with --random-weights, in place of a model's folder."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Fill the model of --config with random weights, at a real scale."),
    ] = False,
    rows: Annotated[str, typer.Option(metavar="N[,N…]", help="Rows at once; a table for each.")] = "1,32,256",
    num_spec_tokens: Annotated[int, typer.Option("--num-spec-tokens", "-k", min=0, help="Drafts a step.")] = 3,
    context: Annotated[int, typer.Option(min=2, help="Tokens that each row holds.")] = 512,
    exactness: Annotated[str | None, typer.Option(help="engine.exactness.")] = None,
    top: Annotated[int, typer.Option(min=0, help="Kernels to list for each kind of work, the longest first.")] = 4,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the traces there, two for each number of rows.")
    ] = None,
    sets: Sets = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the figures there, as JSON (an old file is replaced); - is stdout."
        ),
    ] = None,
) -> None:
    """List every kernel of a decode step on a GPU: launches, time, and the floor of what it must move and compute."""
    from specgen.cli.bench import BenchFlags
    from specgen.cli.profile import profile_kernels

    flags = BenchFlags(
        model=model,
        config=config,
        random_weights=random_weights,
        num_spec_tokens=str(num_spec_tokens),
        sets=sets or (),
        json_path=json_path,
    )
    overrides = {"engine.exactness": exactness} if exactness is not None else {}
    with _exit_codes():
        profile_kernels(flags, overrides, rows=rows, context=context, top=top, traces=traces)


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


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A known model's name, a folder or a hub id.", show_default=False)],
    head: Annotated[
        str | None, typer.Option(help="A draft head in place of the model's own: a name, a folder or a hub id.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16: what the weights are counted in.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Load the weights and test the draft head.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="A draft head that does not fit is an error (2).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a model's folder, whether it fits on this machine, and whether its draft head works."""
    from specgen.cli.inspect import inspect_folder

    with _exit_codes():
        code = inspect_folder(model, head, dtype, device, self_test=self_test, strict=strict, as_json=as_json)
    if code:
        raise typer.Exit(code)


@app.command(epilog=_ACCEPTANCE_WAYS)
def acceptance(
    recipe: RecipeFile,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the input to use.")] = 64,
    temperatures: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            "-t",
            help="Run all rows at it; may be repeated. [default: the rows' own]",
            show_default=False,
        ),
    ] = None,
    sets: Sets = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the counts there, as JSON (an old file is replaced); - is stdout."
        ),
    ] = None,
) -> None:
    """Count accepted drafts on the same rows, by the way drafts are drawn and judged."""
    from specgen.cli.acceptance import acceptance_of

    with _exit_codes():
        code = acceptance_of(
            recipe, sets=sets or (), num_rows=rows, temperatures=temperatures or (), json_path=json_path
        )
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
