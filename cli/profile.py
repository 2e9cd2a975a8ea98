"""`specgen profile`: every kernel of a decode step as a table and as JSON. The measuring is `specgen.job.profile`."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from specgen.cli.bench import BenchFlags, BenchSetup, set_up
from specgen.cli.render import Console, to_stdout
from specgen.cli.render_bench import ceilings_line, print_all
from specgen.cli.signals import Interrupts
from specgen.errors import RecipeError
from specgen.job.places import check_replaceable, write_file

if TYPE_CHECKING:  # they bring torch
    from specgen.job.floor import Ceilings
    from specgen.job.kernels import KernelTable, KindRow

_NAME_WIDTH = 60


def profile_kernels(
    flags: BenchFlags, overrides: Mapping[str, object], *, rows: str, context: int, top: int, traces: Path | None
) -> None:
    """Measure, print a table for each number of rows (to stderr if the JSON goes to stdout) and write the JSON.

    Raises: SpecgenError for whatever is wrong with recipe, model or machine, KeyboardInterrupt after a signal.
    """
    try:
        counts = [int(text) for text in rows.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise RecipeError(f"{rows!r} are no numbers of rows", where="--rows", hint="like 1,32,256")
    with Interrupts() as interrupts:
        interrupts.hold()  # an import that is broken off may take the process with it
        from specgen.job.profile import profile_shape, run_profile
        from specgen.worker.trace import prepare_profiler

        interrupts.release()
        shapes = [profile_shape(count, context) for count in counts]
        setup = set_up(flags, overrides, shapes, interrupts)
        if setup.device.type != "cuda":
            raise RecipeError(
                f"specgen profile lists a GPU's kernels, and the model would run on {setup.device}",
                hint="specgen bench measures on any machine",
            )
        if flags.json_path is not None:
            check_replaceable(flags.json_path, "JSON file", [])
        console = Console()
        prepare_profiler()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if traces is None else traces
            folder.mkdir(parents=True, exist_ok=True)
            machine = setup.machine(console)
            tables = run_profile(
                setup.recipe_of(max(setup.drafts)),
                shapes,
                setup.engine_maker(console),
                machine=machine,
                folder=folder,
                on_note=console.note,
            )
    assert machine.ceilings is not None
    contents: list[RenderableType] = [ceilings_line(machine.ceilings)]
    contents += [_table(table, machine.ceilings, top) for table in tables]
    print_all(contents, to_stderr=flags.json_path == "-")
    if flags.json_path is not None:
        _write_json(flags.json_path, setup, tables, machine.ceilings)


def _write_json(path: str, setup: BenchSetup, tables: "Sequence[KernelTable]", ceilings: "Ceilings") -> None:
    figures = {
        "model": setup.model_name,
        "ceilings": ceilings._asdict(),
        "tables": [table.as_dict(ceilings) for table in tables],
    }
    text = json.dumps(figures, indent=2) + "\n"
    if path == "-":
        to_stdout(text)
    else:
        write_file(path, text, "JSON file")


def _table(table: "KernelTable", ceilings: "Ceilings", top: int) -> Table:
    floor = sum(kind.cost.seconds(ceilings) for kind in table.kinds if kind.cost is not None)
    title = f"{table.rows} rows, K = {table.num_tokens}: {1e6 * table.seconds:,.0f} µs in kernels a step"
    if floor:
        title += f", floor {1e6 * floor:,.0f} µs ({floor / table.seconds:.0%})"
    shown = Table(title=title)
    shown.add_column("part")
    shown.add_column("work, and its kernels")
    for name in ("launches", "µs", "of step", "MB", "GFLOP", "floor µs", "of floor"):
        shown.add_column(name, justify="right")
    for kind in table.kinds:
        _add_kind(shown, kind, table.seconds, ceilings, top)
    return shown


def _add_kind(shown: Table, kind: "KindRow", total: float, ceilings: "Ceilings", top: int) -> None:
    cost = kind.cost
    launches = sum(kernel.launches for kernel in kind.kernels)
    cells = [kind.part, kind.name, f"{launches:,.0f}", f"{1e6 * kind.seconds:,.1f}", f"{kind.seconds / total:.1%}"]
    if cost is None:
        cells += [""] * 4
    else:
        floor = cost.seconds(ceilings)
        cells += [f"{cost.num_bytes / 1e6:,.1f}", f"{cost.flops / 1e9:,.1f}"]
        cells += [f"{1e6 * floor:,.1f}", f"{floor / kind.seconds:.0%}" if kind.seconds else ""]
    shown.add_row(*cells, style="bold")
    for kernel in kind.kernels[:top]:
        name = kernel.name if len(kernel.name) <= _NAME_WIDTH else kernel.name[: _NAME_WIDTH - 1] + "…"
        shown.add_row("", f"  {name}", f"{kernel.launches:,.0f}", f"{1e6 * kernel.seconds:,.1f}", "", "", "", "", "")
    if len(kind.kernels) > top:
        rest = kind.kernels[top:]
        seconds = sum(kernel.seconds for kernel in rest)
        shown.add_row("", f"  {len(rest)} more", "", f"{1e6 * seconds:,.1f}", "", "", "", "", "")
