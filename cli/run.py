"""`specgen run`: puts recipe, rows, engine and output file together."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specgen.cli import codes
from specgen.cli.endings import to_stderr
from specgen.cli.live import Display, JobFigures
from specgen.cli.load_view import LoadView
from specgen.cli.render import Console, show_summary, to_stdout
from specgen.cli.signals import Interrupts
from specgen.errors import EngineError, EngineStuckError, InputError, RecipeError
from specgen.generation_config import with_generation_config
from specgen.job.inputs import Input
from specgen.job.merge import shard_path
from specgen.job.places import check_output, check_replaceable, files_beside, write_file
from specgen.job.target import Target
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import RunStats, counted
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:
    from specgen.job.job import Progress
    from specgen.job.session import Session
    from specgen.job.writer import LineWriter

# Input and output together, beyond which it takes seconds until the model is loaded.
_LARGE_BYTES = 200_000_000


@dataclass(frozen=True)
class RunFlags:
    """What the command line says about a run, beside the recipe's keys."""

    stats_path: Path | None = None
    fresh: bool = False
    retry_failed: bool = False
    shard: str | None = None
    quiet: bool = False
    progress: str = "auto"


def run_recipe(
    recipe_path: Path, input_path: str | None, output: str | None, sets: Sequence[str], flags: RunFlags
) -> int:
    """Run what is left of a recipe and return the exit code.

    Raises: SpecgenError for whatever is wrong with recipe, model, input or output.
    """
    shard = _parsed_shard(flags.shard)
    recipe = load_with_paths(recipe_path, input_path, output, sets)
    target_path = str(recipe.output.path)
    if shard is not None and target_path != "-":
        target_path = shard_path(target_path, shard)
    folder = resolve_model(_required(recipe.model.path, "model.path"))
    recipe = with_generation_config(recipe, folder)
    console = Console(quiet=flags.quiet)
    with Interrupts() as interrupts:
        try:
            rows = Input(recipe.input)
            check_output(target_path, inputs=rows.files, patterns=rows.patterns, recipe_path=recipe_path)
            if flags.stats_path is not None:
                _check_stats_path(flags.stats_path, [str(recipe_path), *rows.files, target_path])
            code = _run(recipe, folder, rows, Target(target_path, fresh=flags.fresh), shard, interrupts, console, flags)
        except KeyboardInterrupt:
            console.warn("interrupted before the first row: no answer was added")
            return interrupts.code
    return code


def _run(
    recipe: Recipe,
    folder: Path,
    rows: Input,
    target: Target,
    shard: tuple[int, int] | None,
    interrupts: Interrupts,
    console: Console,
    flags: RunFlags,
) -> int:
    """Load the model, if there is a row for it, run the job and say what was done.

    Raises: KeyboardInterrupt for a signal before the job has begun; later ones end the job, which says so.
    """
    from specgen.job.session import Session

    tokenizer = Tokenizer(folder)
    note_size(console, [*rows.files, target.path], "rows and answers")
    session = Session(recipe, folder, tokenizer, rows, target, retry_failed=flags.retry_failed, shard=shard)
    try:
        for note in session.notes:
            console.note(note)
        if target.journal.lines:
            console.note(f"resuming: {_lines_there(session)}")
        if not session.has_work:
            session.finish()
            _tell_of_changed(session, console)
            console.note("nothing is left to do")
            return codes.FAILED_ROWS if target.journal.failed else codes.OK
        stats = _run_session(session, folder, interrupts, console, flags)
    finally:
        session.close()
    show_summary(console, stats, target.path, before=_lines_there(session) if target.journal.lines else None)
    _tell_of_changed(session, console)
    if stats.interrupted and not interrupts.stop.is_set():
        console.warn("nobody reads the output any more")
    elif stats.interrupted:
        console.warn(f"interrupted: {_what_is_there(session)}")
    if flags.stats_path is not None:
        _write_stats(stats, str(flags.stats_path))
    if stats.interrupted:
        return interrupts.code
    return codes.FAILED_ROWS if stats.failed or target.journal.failed else codes.OK


def note_size(console: Console, paths: Sequence[str], what: str) -> None:
    """Say that files are looked through, if that takes a while."""
    size = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    if size > _LARGE_BYTES:
        console.note(f"looking through {size / 1e9:.1f} GB of {what}")


def _run_session(
    session: "Session", folder: Path, interrupts: Interrupts, console: Console, flags: RunFlags
) -> RunStats:
    recipe, target = session.recipe, session.target
    console.note(f"loading {recipe.model.path}")
    interrupts.hold()  # an import that is broken off may take the process with it
    from specgen.engine.client import EngineClient

    interrupts.release()
    eos = eos_token_ids(folder, session.tokenizer)
    with EngineClient.create(recipe, folder, eos, progress=LoadView(console)) as engine:
        for line in _engine_lines(engine.description):
            console.note(line)
        shares_terminal = target.path == "-" and sys.stdout.isatty()
        job = JobFigures(session)
        display = Display(console, flags.progress, shares_terminal=shares_terminal)

        def begin(writer: "LineWriter") -> None:
            interrupts.flush = writer.write_held
            interrupts.hold()
            if target.moved_to is not None:
                console.note(f"the old answers are in {target.moved_to}")

        is_told = False

        def update(progress: "Progress") -> None:
            nonlocal is_told
            if interrupts.stop.is_set() and not is_told:
                is_told = True
                _tell_of_stop(progress, recipe.output.on_interrupt, console)
            display.update(lambda: job.shown(progress))

        try:
            with display:
                return session.run(engine, stop=interrupts.stop, on_progress=update, on_begin=begin)
        except BrokenPipeError:
            return session.stats
        except EngineStuckError as error:
            _end_now(error)
        except EngineError:
            console.warn(f"the engine stopped: {_what_is_there(session)}")
            raise


def _what_is_there(session: "Session") -> str:
    """Return what became of a run that was broken off."""
    num_answers = session.stats.samples
    written = f"what had finished was written ({counted(num_answers, 'answer')})"
    resumes = "; the same command goes on from there" if session.target.is_file else ""
    return f"{written if num_answers else 'no answer had finished'}{resumes}"


def _end_now(error: EngineStuckError) -> NoReturn:
    """End the process: an engine that stands still cannot be shut down, and everything is written."""
    to_stderr(f"{error.dump}\nerror: {error}")
    os._exit(codes.BUG)


def _tell_of_stop(progress: "Progress", on_interrupt: str, console: Console) -> None:
    if progress.running and on_interrupt == "finish":
        console.warn("stopping: what is begun is finished first; a second signal ends the run at once")


def _tell_of_changed(session: "Session", console: Console) -> None:
    counts = session.counts
    if counts.changed:
        console.warn(
            f"{counted(counts.changed, 'row')} changed since being answered, the first in {counts.first_changed} of the"
            " input: the old answers stay (take their lines out, or start over with --fresh)"
        )


def _lines_there(session: "Session") -> str:
    journal = session.target.journal
    failed = f", {journal.failed:,} of them failed" if journal.failed else ""
    return f"{counted(journal.lines, 'answer')} there already{failed}"


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
    _required(recipe.input.paths, "input.path", "or give the rows on the command line")
    explicit = output is not None or recipe.origins["output.path"] == "--set"
    if recipe.input.path == "-" and not explicit and (input_path is not None or recipe.output.path is None):
        recipe = load_recipe(recipe_path, sets, overrides | {"output.path": "-"})
    _required(recipe.output.path, "output.path", "or use --output")
    return recipe


def _parsed_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or not 1 <= int(number) <= int(count):
        raise RecipeError(f"{text!r} is not of the form i/n with 1 ≤ i ≤ n", where="--shard")
    return int(number), int(count)


def _required(value: str | tuple[str, ...] | None, key: str, hint: str | None = None) -> str:
    if not value:
        raise RecipeError(f"{key} is missing", hint=hint)
    return str(value)


def _check_stats_path(path: Path, files: Sequence[str]) -> None:
    output = files[-1]
    if str(path) == "-" and output == "-":
        raise InputError("statistics and answers cannot both go to stdout", where="--stats -")
    check_replaceable(str(path), "statistics file", [*files, *files_beside(output)])


def _write_stats(stats: RunStats, path: str) -> None:
    text = json.dumps(stats.as_dict(), indent=2) + "\n"
    if path == "-":
        to_stdout(text)
    else:
        write_file(path, text, "statistics file")


def _engine_lines(description: dict[str, object]) -> list[str]:
    """Return what was resolved, and where the memory goes: its parts add up to the limit."""
    wanted = ("device", "dtype", "kv_dtype", "num_speculative_tokens", "max_num_seqs", "kv_tokens", "load_seconds")
    lines = [", ".join(f"{name} {description[name]}" for name in wanted if name in description)]
    memory = description.get("memory")
    if isinstance(memory, dict):
        lines.append("memory, MiB: " + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in memory.items()))
    return lines
