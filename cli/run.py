"""`specgen run`: puts recipe, rows, engine and output file together, and watches for signals."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from specgen.cli import codes
from specgen.cli.render import Console, ProgressView, show_summary
from specgen.errors import InputError, RecipeError
from specgen.job.readers import ReadAhead, RowReader, count_lines, open_input
from specgen.job.writer import LineWriter, check_output, move_aside
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import RunStats
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # it brings torch
    from specgen.engine.client import EngineClient


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
    check_output(target_path, input_path=source_path, overwrite=overwrite)
    if stats_path is not None:
        _check_stats_path(stats_path, (recipe_path, source_path, target_path))
    folder = resolve_model(_required(recipe.model.path, "model.path"))
    console = Console(quiet=quiet)
    stop = threading.Event()
    with _signals(stop) as job_is_running, open_input(source_path) as stream:
        reader = RowReader(stream, where=source_path, id_column=recipe.input.id, limit=recipe.input.limit)
        source = ReadAhead(reader)
        source.require_first()
        tokenizer = Tokenizer(folder)
        console.note(f"loading {recipe.model.path}")
        from specgen.engine.client import EngineClient

        with EngineClient.create(recipe, folder, eos_token_ids(folder, tokenizer)) as engine:
            for line in _engine_lines(engine.description):
                console.note(line)
            if target_path != "-":
                write_recipe_beside(recipe, overwrite=overwrite)
            job_is_running.set()
            stats = _run_job(recipe, engine, tokenizer, source, stop, console, overwrite=overwrite)
    if stats_path is not None:
        _write_stats(stats, stats_path)
    show_summary(console, stats, target_path)
    if stats.interrupted:
        console.warn("interrupted: the rows that had finished were written")
        return codes.INTERRUPTED
    return codes.FAILED_ROWS if stats.failed else codes.OK


def _run_job(
    recipe: Recipe,
    engine: "EngineClient",
    tokenizer: Tokenizer,
    source: ReadAhead,
    stop: threading.Event,
    console: Console,
    *,
    overwrite: bool,
) -> RunStats:
    from specgen.job.job import Job

    path = str(recipe.output.path)
    total = count_lines(str(recipe.input.path))
    if total is not None and recipe.input.limit is not None:
        total = min(total, recipe.input.limit)
    job: Job | None = None
    try:
        with (
            LineWriter.open(path, ordered=recipe.output.order == "input", overwrite=overwrite) as writer,
            ProgressView(console, total, shares_terminal=path == "-" and sys.stdout.isatty()) as view,
        ):
            job = Job(recipe, engine, tokenizer, source, writer, stop=stop, on_progress=view.update)
            return job.run()
    except BrokenPipeError:  # whoever read our output has seen enough
        assert job is not None
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


def _write_stats(stats: RunStats, path: Path) -> None:
    text = json.dumps(stats.as_dict(), indent=2)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _check_stats_path(path: Path, others: Sequence[Path | str]) -> None:
    if str(path) == "-":
        if others[-1] == "-":
            raise InputError("statistics and answers cannot both go to stdout", where="--stats -")
        return
    if any(str(other) != "-" and path.resolve() == Path(other).resolve() for other in others):
        raise InputError("the statistics would overwrite a file of this job", where=str(path))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError("the statistics file cannot be made there", where=str(path))


def write_recipe_beside(recipe: Recipe, *, overwrite: bool) -> None:
    """Write `<output>.recipe.yaml`, the resolved recipe with every value's origin."""
    output = Path(str(recipe.output.path))
    if output.exists() and not output.is_file():
        return  # a device or a pipe
    path = Path(f"{output}.recipe.yaml")
    if overwrite:
        move_aside(path)
    path.write_text(recipe.to_yaml_with_origins(), encoding="utf-8")


def _engine_lines(description: dict[str, object]) -> list[str]:
    """Return what was resolved, and where the memory goes: its parts add up to the limit."""
    wanted = ("device", "dtype", "num_speculative_tokens", "max_num_seqs", "kv_tokens", "load_seconds")
    lines = [", ".join(f"{name} {description[name]}" for name in wanted if name in description)]
    memory = description.get("memory")
    if isinstance(memory, dict):
        lines.append("memory, MiB: " + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in memory.items()))
    return lines


@contextmanager
def _signals(stop: threading.Event) -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into `stop` once the yielded event is set, into KeyboardInterrupt before.

    A second signal ends the process at once: every line that was flushed is whole.
    """
    job_is_running = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(codes.INTERRUPTED)
        stop.set()
        if not job_is_running.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield job_is_running
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield job_is_running
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
