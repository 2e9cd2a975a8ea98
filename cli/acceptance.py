"""`specgen acceptance`: how many drafts are kept, by the way they are drawn and judged, as a table and as JSON.

The measuring is `specgen.job.acceptance`.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.table import Table

from specgen.cli import codes
from specgen.cli.render import Console, to_stdout
from specgen.cli.signals import Interrupts
from specgen.errors import RecipeError
from specgen.generation_config import with_generation_config
from specgen.job.places import check_replaceable, write_file
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # they bring torch
    from specgen.engine.client import EngineClient
    from specgen.job.acceptance import Acceptance
    from specgen.job.verify import VerifyRow
    from specgen.worker.speculator import Drafting

_WIDTH = 100


def acceptance_of(
    recipe_path: Path, *, sets: Sequence[str], num_rows: int, temperatures: Sequence[float], json_path: str | None
) -> int:
    """Measure, print the table (to stderr if the JSON goes to stdout), write the JSON, and return the exit code.

    temperatures: at which all rows are run; none leaves each its own.

    Raises: SpecgenError for whatever is wrong with recipe, model or rows, KeyboardInterrupt after a signal.
    """
    recipe = load_recipe(recipe_path, sets)
    if recipe.model.path is None or recipe.input.path is None:
        raise RecipeError("acceptance needs model.path and input.path", where=str(recipe_path))
    if recipe.speculation.num_tokens == 0:
        raise RecipeError(
            "acceptance needs drafts, and speculation.num_tokens is 0",
            where=recipe.origins.get("speculation.num_tokens", str(recipe_path)),
        )
    if json_path is not None:
        check_replaceable(json_path, "JSON file", [str(recipe_path), *recipe.input.paths])
    with Interrupts() as interrupts:
        found = _measure(recipe, interrupts, temperatures, num_rows)
    _show(found, to_stderr=json_path == "-")
    if json_path is not None:
        content = {
            "model": recipe.model.path,
            "num_spec_tokens": recipe.speculation.num_tokens,
            "results": [one.as_dict() for one in found],
        }
        text = json.dumps(content, indent=2) + "\n"
        if json_path == "-":
            to_stdout(text)
        else:
            write_file(json_path, text, "JSON file")
    return codes.OK


def _measure(
    recipe: Recipe, interrupts: Interrupts, temperatures: Sequence[float], num_rows: int
) -> "list[Acceptance]":
    interrupts.hold()  # an import that is broken off may take the process with it
    from specgen.engine.client import EngineClient
    from specgen.job.acceptance import measure_acceptance
    from specgen.job.verify import prepare_rows
    from specgen.job.workloads import read_bench_rows

    interrupts.release()
    folder = resolve_model(str(recipe.model.path))
    recipe = with_generation_config(recipe, folder)
    tokenizer = Tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)
    rows = read_bench_rows(recipe, num_rows)

    def make_rows(side: Recipe) -> "list[VerifyRow]":
        return prepare_rows(side, folder, rows, tokenizer)

    def make_engine(side: Recipe, drafting: "Drafting") -> "EngineClient":
        return EngineClient.create(side, folder, eos, drafting=drafting)

    return measure_acceptance(recipe, list(temperatures) or [None], make_rows, make_engine, on_progress=Console().note)


def _show(found: "Sequence[Acceptance]", *, to_stderr: bool) -> None:
    """Print the table.

    Raises: InputError, BrokenPipeError if stdout does not take it.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name in ("temperature", "drafts"):
        table.add_column(name)
    for name in ("tokens/step", "accepted of drafted", "by position", "tokens"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            "the rows'" if one.temperature is None else f"{one.temperature:g}",
            one.way,
            f"{one.spec.mean_accepted_length:.3f}",
            f"{one.spec.acceptance_rate:.3f}",
            " ".join(f"{rate:.3f}" for rate in one.spec.acceptance_per_pos),
            f"{one.spec.emitted:,}",
        )
    console = RichConsole(highlight=False, markup=False, emoji=False, width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    if to_stderr:
        with contextlib.suppress(OSError):
            print(captured.get(), end="", file=sys.stderr)
    else:
        to_stdout(captured.get())
