"""`specgen run`: puts recipe, rows, engine and output file together."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specgen.cli import codes
from specgen.cli.render import Console, ProgressView, show_summary, to_stdout
from specgen.cli.signals import Interrupts
from specgen.errors import InputError, RecipeError
from specgen.job.readers import ReadAhead, RowReader, count_lines, name_of, open_input
from specgen.job.writer import LineWriter, check_output, check_replaceable, recipe_beside, write_file, write_new
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import RunStats, counted
from specgen.tokenizer import Tokenizer, eos_token_ids


def run_recipe(
    recipe_path: Path,
    input_path: str | None,
    *,
    output: str | None,
    sets: Sequence[str],
    stats_path: Path | None,
    overwrite: bool,
    quiet: bool,
) -> int:
    """Run a recipe to its end and return the exit code.

    Raises: SpecgenError for whatever is wrong with recipe, model, input or output.
    """
    recipe = load_with_paths(recipe_path, input_path, output, sets)
    source_path, target_path = str(recipe.input.path), str(recipe.output.path)
    check_output(target_path, input_path=source_path, overwrite=overwrite, recipe_path=recipe_path)
    if stats_path is not None:
        _check_stats_path(stats_path, [str(recipe_path), source_path, target_path])
    console = Console(quiet=quiet)
    with Interrupts() as interrupts:
        try:
            stats = _run(recipe, interrupts, console, overwrite=overwrite)
        except KeyboardInterrupt:
            console.warn("interrupted before the first row: there are no answers")
            return codes.INTERRUPTED
    show_summary(console, stats, target_path)
    if stats.interrupted:
        written = f"what had finished was written ({counted(stats.rows, 'row')})"
        console.warn(f"interrupted: {written if stats.rows else 'no row had finished'}")
    if stats_path is not None:
        _write_stats(stats, str(stats_path))
    if stats.interrupted:
        return codes.INTERRUPTED
    return codes.FAILED_ROWS if stats.failed else codes.OK


def _run(recipe: Recipe, interrupts: Interrupts, console: Console, *, overwrite: bool) -> RunStats:
    """Load the model, once there is a row for it, and run the job.

    Raises: KeyboardInterrupt for a signal before the job has begun; later ones end the job, which says so.
    """
    source_path, target_path = str(recipe.input.path), str(recipe.output.path)
    folder = resolve_model(_required(recipe.model.path, "model.path"))
    with open_input(source_path) as stream:
        where = name_of(source_path)
        source = ReadAhead(RowReader(stream, where=where, id_column=recipe.input.id, limit=recipe.input.limit))
        source.require_first()
        tokenizer = Tokenizer(folder)
        console.note(f"loading {recipe.model.path}")
        interrupts.hold()  # an import that is broken off may take the process with it
        from specgen.engine.client import EngineClient
        from specgen.job.job import Job

        interrupts.release()
        with EngineClient.create(recipe, folder, eos_token_ids(folder, tokenizer)) as engine:
            for line in _engine_lines(engine.description):
                console.note(line)
            total = None if console.quiet else count_lines(source_path, recipe.input.limit)
            view = ProgressView(console, total, shares_terminal=target_path == "-" and sys.stdout.isatty())
            ordered = recipe.output.order == "input"
            job: Job | None = None
            try:
                with LineWriter.open(target_path, ordered=ordered, overwrite=overwrite) as writer, view:
                    interrupts.flush = writer.flush
                    interrupts.hold()
                    _write_recipe_beside(recipe, overwrite=overwrite)
                    job = Job(recipe, engine, tokenizer, source, writer, stop=interrupts.stop, on_progress=view.update)
                    return job.run()
            except BrokenPipeError:
                if job is None:
                    raise
                console.warn("nobody reads the output any more")
                job.stats.interrupted = True
                return job.stats


def load_with_paths(recipe_path: Path, input_path: str | None, output: str | None, sets: Sequence[str]) -> Recipe:
    """Return the recipe with input and output decided: flags first, stdout if the rows come from stdin.

    Raises: RecipeError if there is no input or no output.
    """
    overrides: dict[str, object] = {}
    if input_path is not None:
        overrides["input.path"] = input_path
    if output is not None:
        overrides["output.path"] = output
    recipe = load_recipe(recipe_path, sets, overrides)
    _required(recipe.input.path, "input.path", "or give the rows on the command line")
    explicit = output is not None or recipe.origins["output.path"] == "--set"
    if recipe.input.path == "-" and not explicit and (input_path is not None or recipe.output.path is None):
        recipe = load_recipe(recipe_path, sets, overrides | {"output.path": "-"})
    _required(recipe.output.path, "output.path", "or use --output")
    return recipe


def _required(value: str | None, key: str, hint: str | None = None) -> str:
    if value is None:
        raise RecipeError(f"{key} is missing", hint=hint)
    return value


def _check_stats_path(path: Path, files: Sequence[str]) -> None:
    output = files[-1]
    if str(path) == "-" and output == "-":
        raise InputError("statistics and answers cannot both go to stdout", where="--stats -")
    beside = recipe_beside(output)
    check_replaceable(str(path), "statistics file", files if beside is None else [*files, beside])


def _write_stats(stats: RunStats, path: str) -> None:
    text = json.dumps(stats.as_dict(), indent=2) + "\n"
    if path == "-":
        to_stdout(text)
    else:
        write_file(path, text, "statistics file")


def _write_recipe_beside(recipe: Recipe, *, overwrite: bool) -> None:
    """Write `<output>.recipe.yaml`, the resolved recipe with every value's origin."""
    path = recipe_beside(str(recipe.output.path))
    if path is not None:
        write_new(path, recipe.to_yaml_with_origins(), overwrite=overwrite)


def _engine_lines(description: dict[str, object]) -> list[str]:
    """Return what was resolved, and where the memory goes: its parts add up to the limit."""
    wanted = ("device", "dtype", "num_speculative_tokens", "max_num_seqs", "kv_tokens", "load_seconds")
    lines = [", ".join(f"{name} {description[name]}" for name in wanted if name in description)]
    memory = description.get("memory")
    if isinstance(memory, dict):
        lines.append("memory, MiB: " + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in memory.items()))
    return lines
