"""The commands that measure and compare, as the command line has them: bench, profile, verify, acceptance, inspect.

Knows arguments and help texts; what a command does is in the module of its name, imported when it runs.
"""

import enum
from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.endings import exit_codes
from specgen.cli.options import JsonFile, RecipeFile, Sets
from specgen.recipe import ModelSection

VERIFY_RULE = (
    "A difference is a near-tie if both sides' logits there differ by no more than rounding does, 20 tolerances, and"
    " the gap between the two tokens' scores is at most 4 times what they differ by, or at most the tolerance (0.0001"
    " in float32, 0.05 in bfloat16); or if, for such logits, a filter like top-p kept a token on one side only."
    " Exit codes: 0 the same tokens in every row, 3 near-ties only, 4 a real difference."
)
BENCH_COLUMNS = (
    "tokens/s: output tokens over the wall time of a round, prompts included; × K=0: that over plain decoding's."
    " tokens a step: that a row gains. All further columns are of a decode step with all rows: ms a step, from the"
    " start of one to the start of the next; target, sampling (verification included) and draft, its parts; gap, the"
    " time between two steps. On a GPU such a step is one CUDA graph, and the parts come from events within the graph,"
    " in a pass of its own. floor: ms that the step's weights, KV and arithmetic need at this machine's speed, which is"
    " measured first by a large copy and a large product; of floor: floor over ms a step. GB/s and TFLOP/s: what the"
    " step must read and compute over ms a step."
)
ACCEPTANCE_WAYS = (
    "shared: drafts with the target's own noise, judged strictly, as a run has them. unprocessed: the same, but"
    " penalties and filters do not act on drafts (only shown if a row has any). argmax: the draft layer's likeliest"
    " tokens, judged strictly. ratio: speculation.method: ratio."
)


class Against(enum.Enum):
    """What `specgen verify` compares with."""

    PLAIN = "plain"
    TRANSFORMERS = "transformers"


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
    json_path: JsonFile = None,
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
    with exit_codes():
        bench_recipe(flags, {key: value for key, value in keys.items() if value is not None})


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
    json_path: JsonFile = None,
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
    with exit_codes():
        profile_kernels(flags, overrides, rows=rows, context=context, top=top, traces=traces)


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
    json_path: JsonFile = None,
) -> None:
    """Compare the tokens of a recipe's run with a plainer way to compute them; show each row's first difference."""
    from specgen.cli.verify import verify_recipe

    with exit_codes():
        code = verify_recipe(recipe, against=against.value, sets=sets or (), num_rows=rows, json_path=json_path)
    raise typer.Exit(code)


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
    json_path: JsonFile = None,
) -> None:
    """Count accepted drafts on the same rows, by the way drafts are drawn and judged."""
    from specgen.cli.acceptance import acceptance_of

    with exit_codes():
        code = acceptance_of(
            recipe, sets=sets or (), num_rows=rows, temperatures=temperatures or (), json_path=json_path
        )
    raise typer.Exit(code)


def inspect(
    model: Annotated[str, typer.Argument(help="A known model's name, a folder or a hub id.", show_default=False)],
    head: Annotated[
        str | None, typer.Option(help="A draft head in place of the model's own: a name, a folder or a hub id.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16: what the weights are counted in.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto (as --dtype) or float8: what the KV is counted in.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Load the weights and test the draft head.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="A draft head that does not fit is an error (2).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a model's folder, whether it fits on this machine, and whether its draft head works."""
    from specgen.cli.inspect import inspect_folder

    with exit_codes():
        section = ModelSection(path=model, dtype=dtype, device=device, kv_dtype=kv_dtype)
        code = inspect_folder(section, head, self_test=self_test, strict=strict, as_json=as_json)
    if code:
        raise typer.Exit(code)
