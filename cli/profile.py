"""`specgen profile`: every kernel of a decode step as tables and as JSON. The measuring is `specgen.job.profile`."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from specgen.cli.bench_setup import BenchFlags, BenchSetup, set_up
from specgen.cli.render import Console, to_stdout
from specgen.cli.render_bench import ceilings_line, print_all
from specgen.cli.render_profile import kernel_view, markdown
from specgen.cli.signals import Interrupts
from specgen.errors import InputError, RecipeError
from specgen.job.places import check_replaceable, write_file

if TYPE_CHECKING:  # they bring torch
    from specgen.job.floor import Ceilings
    from specgen.job.kernels import KernelTable


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """What the command line says of tables and files. rows, contexts: as they were typed."""

    rows: str
    contexts: str
    top: int
    traces: Path | None
    markdown_path: str | None


def profile_kernels(flags: BenchFlags, wanted: ProfileFlags) -> None:
    """Measure, print a table for each number of rows and tokens (to stderr if a file goes to stdout), write the files.

    The files have what is known so far all the time.

    Raises: SpecgenError for whatever is wrong with recipe, model or machine, KeyboardInterrupt after a signal.
    """
    counts = _numbers(wanted.rows, "--rows", least=1, hint="like 1,32,256")
    contexts = _numbers(wanted.contexts, "--context", least=2, hint="like 512, or 1024,8192")
    with Interrupts() as interrupts:
        interrupts.hold()  # an import that is broken off may take the process with it
        from specgen.job.profile import profile_shape, run_profile
        from specgen.worker.trace import prepare_profiler

        interrupts.release()
        shapes = [profile_shape(count, context) for context in contexts for count in counts]
        setup = set_up(flags, {}, shapes, interrupts)
        if setup.device.type != "cuda":
            raise RecipeError(
                f"specgen profile lists a GPU's kernels, and the model would run on {setup.device}",
                hint="specgen bench measures on any machine",
            )
        if len(setup.exactness) > 1:
            raise RecipeError("a profile is of one mode", where="--exactness", hint="exact or fast")
        files = {"JSON file": flags.json_path, "Markdown file": wanted.markdown_path}
        _check_files(files)
        console = Console()
        prepare_profiler()
        with tempfile.TemporaryDirectory() as scratch:
            folder = _made(wanted.traces) if wanted.traces is not None else Path(scratch)
            machine = setup.machine(console)
            ceilings = machine.ceilings
            assert ceilings is not None

            def keep(tables: "Sequence[KernelTable]") -> None:
                for what, path in files.items():
                    if path is not None and path != "-":
                        with suppress(InputError):  # tables that were not written are still shown, and told of then
                            write_file(path, _text(what, setup, tables, ceilings, wanted.top), what)

            tables = run_profile(
                setup.recipe_of(max(setup.drafts).num),
                shapes,
                setup.engine_maker(console),
                machine=machine,
                folder=folder,
                on_note=console.note,
                on_table=keep,
            )
    contents: list[RenderableType] = [ceilings_line(ceilings)]
    contents += [kernel_view(table, ceilings, wanted.top) for table in tables]
    print_all(contents, to_stderr="-" in files.values())
    for what, path in files.items():
        if path == "-":
            to_stdout(_text(what, setup, tables, ceilings, wanted.top))
        elif path is not None:
            write_file(path, _text(what, setup, tables, ceilings, wanted.top), what)


def _numbers(text: str, flag: str, *, least: int, hint: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise RecipeError(f"{text!r} are no numbers from {least} up", where=flag, hint=hint)
    return list(dict.fromkeys(found))


def _check_files(files: dict[str, str | None]) -> None:
    paths = [path for path in files.values() if path is not None]
    for what, path in files.items():
        if path is not None:
            others = list(paths)
            others.remove(path)
            check_replaceable(path, what, others)


def _made(folder: Path) -> Path:
    """The folder, made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder for traces cannot be made: {error.strerror}", where=str(folder)) from None
    return folder


def _text(what: str, setup: BenchSetup, tables: "Sequence[KernelTable]", ceilings: "Ceilings", top: int) -> str:
    if what == "Markdown file":
        return markdown(setup.model_name, tables, ceilings, top)
    figures = {
        "model": setup.model_name,
        "recipe": setup.plain_recipe(),
        "ceilings": ceilings._asdict(),
        "tables": [table.as_dict(ceilings) for table in tables],
    }
    return json.dumps(figures, indent=2) + "\n"
