"""The commands around a job, as the command line has them: run, check, merge, report.

Knows arguments and help texts; what a command does is in the module of its name, imported when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.endings import exit_codes
from specgen.cli.options import InputFile, JsonFile, Progress, ProgressMode, RecipeFile, Sets


@exit_codes()
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
    progress: Progress = ProgressMode.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary; warnings stay.")] = False,
) -> None:
    """Run a recipe, or what an earlier run left: one output line for every answer, whatever happened to the row."""
    from specgen.cli.run import RunFlags, run_recipe

    flags = RunFlags(
        stats_path=stats, fresh=fresh, retry_failed=retry_failed, shard=shard, quiet=quiet, progress=progress.value
    )
    code = run_recipe(recipe, input_path, output, sets or (), flags)
    raise typer.Exit(code)


@exit_codes()
def check(
    recipe: RecipeFile,
    input_path: InputFile = None,
    sets: Sets = None,
    progress: Progress = ProgressMode.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; warnings stay.")] = False,
) -> None:
    """Show the resolved recipe with each value's origin, and look at model and rows without loading weights."""
    from specgen.cli.check import check_recipe

    code = check_recipe(recipe, input_path, sets=sets or (), progress=progress.value, quiet=quiet)
    raise typer.Exit(code)


@exit_codes()
def merge(
    output: Annotated[str, typer.Argument(help="The output to make, as NAME.jsonl.", show_default=False)],
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="The shards' outputs. [default: all NAME.I-of-N.jsonl beside it]", show_default=False),
    ] = None,
) -> None:
    """Put the outputs of `run --shard` together, in the order of the input, checked for gaps and doubles."""
    from specgen.cli.merge import merge_outputs

    code = merge_outputs(output, parts or ())
    raise typer.Exit(code)


@exit_codes()
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
    json_path: JsonFile = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Slice the figures by a column of the input; repeatable.")
    ] = None,
) -> None:
    """Show what an output says about its run: acceptance, lengths, endings, failures, the manifest; one HTML page."""
    from specgen.cli.report import report_output

    code = report_output(output, page=page, json_path=json_path, by=by or ())
    raise typer.Exit(code)
