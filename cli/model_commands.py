"""The commands that measure and compare, as the command line has them: bench, profile, verify, acceptance, inspect.

Knows arguments and help texts; what a command does is in the module of its name, imported when it runs.
"""

import enum
from typing import Annotated

import typer

from specgen.cli import bench_options as opts
from specgen.cli.endings import exit_codes
from specgen.cli.options import JsonFile, RecipeFile, Sets
from specgen.recipe_sections import ModelSection

VERIFY_RULE = (
    "A difference is a near-tie if both sides' logits there differ by no more than rounding does, 20 tolerances, and"
    " the gap between the two tokens' scores is at most 4 times what they differ by, or at most the tolerance (0.0001"
    " in float32, 0.05 in bfloat16); or if, for such logits, a filter like top-p kept a token on one side only."
    " Exit codes: 0 the same tokens in every row, 3 near-ties only, 4 a real difference."
)
BENCH_COLUMNS = (
    "tokens/s: output tokens over the wall time of a round, prompts included; × K=0: that over plain decoding's."
    " tokens a step: that a row gains. All further columns are of a decode step with all rows: ms a step, from the"
    " start of one to the start of the next (the median); target, sampling (verification included) and draft, its"
    " parts; gap, the time between two steps. On a GPU such a step is one CUDA graph, and the parts come from events"
    " within the graph, in a pass of its own. floor: ms that the step's weights, KV and arithmetic need at this"
    " machine's speed, which is measured first by a large copy and a large product; of floor: floor over ms a step."
    " GB/s and TFLOP/s: what the step must read and compute over ms a step. The table of traced steps: busy, ms of a"
    " step in which the device ran something; idle, the rest of a step without a profiler; attention, ms of its kernels"
    " in target and draft layers, and the share of their floor."
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


@exit_codes()
def bench(
    num_spec_tokens: opts.Drafts = None,
    recipe: opts.Recipe = None,
    model: opts.Model = None,
    config: opts.Config = None,
    random_weights: opts.RandomWeights = False,
    shape: opts.Shapes = None,
    skip_prompts: opts.SkipPrompts = False,
    synthetic_acceptance: opts.Acceptance = None,
    exactness: opts.Exactness = None,
    rows: opts.Rows = 64,
    max_tokens: opts.MaxTokens = None,
    rounds: opts.Rounds = 3,
    temperature: opts.Temperature = None,
    with_peer: opts.Peer = False,
    sets: Sets = None,
    json_path: JsonFile = None,
    idle: opts.Traced = True,
    trace: opts.TraceFile = None,
) -> None:
    """Measure plain against speculative decoding, on the same rows and in one run."""
    from specgen.cli.bench import bench_recipe
    from specgen.cli.bench_setup import BenchFlags

    keys = {"sampling.max_tokens": max_tokens, "sampling.temperature": temperature}
    flags = BenchFlags(
        recipe_path=recipe,
        model=model,
        config=config,
        random_weights=random_weights,
        shapes=shape or (),
        skips_prompts=skip_prompts,
        num_spec_tokens=num_spec_tokens,
        acceptance=synthetic_acceptance,
        exactness=exactness,
        sets=sets or (),
        num_rows=rows,
        num_rounds=rounds,
        json_path=json_path,
        with_traces=idle,
        trace_path=trace,
        with_peer=with_peer,
    )
    bench_recipe(flags, {key: value for key, value in keys.items() if value is not None})


@exit_codes()
def profile(
    model: opts.Model = None,
    config: opts.Config = None,
    random_weights: opts.RandomWeights = False,
    rows: opts.RowCounts = "1,32,256",
    context: opts.Contexts = "512",
    num_spec_tokens: opts.NumDrafts = 3,
    exactness: opts.OneExactness = None,
    top: opts.Top = 4,
    traces: opts.Traces = None,
    sets: Sets = None,
    json_path: JsonFile = None,
    markdown: opts.Markdown = None,
) -> None:
    """List every kernel of a decode step on a GPU: launches, time, and the floor of what it must move and compute."""
    from specgen.cli.bench_setup import BenchFlags
    from specgen.cli.profile import ProfileFlags, profile_kernels

    flags = BenchFlags(
        model=model,
        config=config,
        random_weights=random_weights,
        num_spec_tokens=str(num_spec_tokens),
        exactness=exactness,
        sets=sets or (),
        json_path=json_path,
    )
    profile_kernels(flags, ProfileFlags(rows, context, top, traces, markdown))


@exit_codes()
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

    code = verify_recipe(recipe, against=against.value, sets=sets or (), num_rows=rows, json_path=json_path)
    raise typer.Exit(code)


@exit_codes()
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

    code = acceptance_of(recipe, sets=sets or (), num_rows=rows, temperatures=temperatures or (), json_path=json_path)
    raise typer.Exit(code)


@exit_codes()
def inspect(
    model: Annotated[str, typer.Argument(help="A known model's name, a folder or a hub id.", show_default=False)],
    head: Annotated[
        str | None, typer.Option(help="A draft head in place of the model's own: a name, a folder or a hub id.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16: what the weights are counted in.")] = "auto",
    float8: Annotated[
        str, typer.Option(help="dequantise or keep: what becomes of weights that are stored in FP8.")
    ] = "dequantise",
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

    section = ModelSection(path=model, dtype=dtype, device=device, float8=float8, kv_dtype=kv_dtype)
    code = inspect_folder(section, head, self_test=self_test, strict=strict, as_json=as_json)
    if code:
        raise typer.Exit(code)
