"""`specgen verify`: the recipe's run against a plainer one, row by row, as a table and as JSON.

The comparing is `specgen.job.verify`.
"""

import contextlib
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.table import Table

from specgen.cli import codes
from specgen.cli.load_view import LoadView
from specgen.cli.render import Console, to_stdout
from specgen.cli.signals import Interrupts
from specgen.engine.request import EOS_NAME
from specgen.errors import RecipeError
from specgen.generation_config import with_generation_config
from specgen.job.places import check_replaceable, write_file
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import counted
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # they bring torch
    from specgen.job.verdict import Candidate, Difference
    from specgen.job.verify import VerifyResult

_WIDTH = 100
_BFLOAT16_HINT = (
    "In bfloat16, two implementations may send a token to different experts, which moves logits by more than rounding"
    " alone: --set model.dtype=float32 tells that from a fault."
)


def verify_recipe(recipe_path: Path, *, against: str, sets: Sequence[str], num_rows: int, json_path: str | None) -> int:
    """Compare, print the table (to stderr if the JSON goes to stdout), write the JSON, and return the exit code.

    against: "plain" or "transformers".

    Raises: SpecgenError for whatever is wrong with recipe, model or rows, KeyboardInterrupt after a signal.
    """
    recipe = load_recipe(recipe_path, sets)
    if recipe.model.path is None or recipe.input.path is None:
        raise RecipeError("verify needs model.path and input.path", where=str(recipe_path))
    if recipe.speculation.method != "exact":
        raise RecipeError(
            f"verify compares tokens, and speculation.method: {recipe.speculation.method} does not promise the plain"
            " ones",
            where=recipe.origins.get("speculation.method", str(recipe_path)),
            hint="--set speculation.method=exact",
        )
    if against == "transformers" and recipe.model.kv_dtype != "auto":
        raise RecipeError(
            f"transformers caches what it computes, and model.kv_dtype: {recipe.model.kv_dtype} rounds it: the tokens"
            " are not the same",
            where=recipe.origins.get("model.kv_dtype", str(recipe_path)),
            hint="--set model.kv_dtype=auto, or --against plain",
        )
    if json_path is not None:
        check_replaceable(json_path, "JSON file", [str(recipe_path), *recipe.input.paths])
    with Interrupts() as interrupts:
        result = _compare(recipe, interrupts, against, num_rows)
    _show(result, to_stderr=json_path == "-")
    if json_path is not None:
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.values().items()}
        content = {"model": recipe.model.path, "recipe": settings, **result.as_dict()}
        text = json.dumps(content, indent=2) + "\n"
        if json_path == "-":
            to_stdout(text)
        else:
            write_file(json_path, text, "JSON file")
    if result.num_real:
        return codes.DIFFERENT
    return codes.NEAR_TIES if result.num_near_ties else codes.OK


def _compare(recipe: Recipe, interrupts: Interrupts, against: str, num_rows: int) -> "VerifyResult":
    interrupts.hold()  # an import that is broken off may take the process with it
    from specgen.engine.client import EngineClient
    from specgen.job.verify import new_probe, plain_differences, prepare_rows, run_verify
    from specgen.job.verify_peer import load_transformers, require_largest_logit, transformers_differences
    from specgen.job.workloads import read_bench_rows

    interrupts.release()
    folder = resolve_model(str(recipe.model.path))
    recipe = with_generation_config(recipe, folder)
    tokenizer = Tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)
    rows = prepare_rows(recipe, folder, read_bench_rows(recipe, num_rows), tokenizer)
    console = Console()
    note = console.note

    def make_engine(side: Recipe) -> EngineClient:
        return EngineClient.create(side, folder, eos, progress=LoadView(console))

    if against == "transformers":
        require_largest_logit(rows)
        load = load_transformers(recipe, folder)
        find = functools.partial(transformers_differences, rows, load, on_progress=note)
    else:
        find = functools.partial(plain_differences, recipe, rows, make_engine, on_progress=note)
    return run_verify(
        recipe,
        rows,
        make_engine,
        functools.partial(new_probe, recipe, folder),
        find,
        against=against,
        text_of=lambda token_id: EOS_NAME if token_id in eos else tokenizer.decode([token_id]),
        on_progress=note,
    )


def _show(result: "VerifyResult", *, to_stderr: bool) -> None:
    """Print a block for each row that differs, then the counts.

    Raises: InputError, BrokenPipeError if stdout does not take them.
    """
    console = RichConsole(highlight=False, markup=False, emoji=False, width=_WIDTH, color_system=None)
    with console.capture() as captured:
        for row in result.rows:
            if row.difference is not None:
                console.print(f"row {row.name}, output token {row.difference.position}", soft_wrap=True)
                console.print(_table_of(row.difference))
                console.print(f"{_kind(row.difference)}: {row.difference.reason}\n", soft_wrap=True)
        num_same = len(result.rows) - result.num_near_ties - result.num_real
        console.print(
            f"{counted(len(result.rows), 'row')}, {counted(result.num_tokens, 'output token')},"
            f" {counted(result.num_spec_tokens, 'draft')} a step, against {result.against}:"
            f" {num_same:,} the same, {result.num_near_ties:,} near-ties, {result.num_real:,} real differences",
            soft_wrap=True,
        )
        if result.num_real and result.against == "transformers" and result.dtype == "bfloat16":
            console.print(_BFLOAT16_HINT, soft_wrap=True)
    if to_stderr:
        with contextlib.suppress(OSError):
            print(captured.get(), end="", file=sys.stderr)
    else:
        to_stdout(captured.get())


def _kind(difference: "Difference") -> str:
    return "near-tie" if difference.is_near_tie else "REAL DIFFERENCE"


def _table_of(difference: "Difference") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="")
    table.add_column("")
    sides = (difference.speculative, difference.other)
    for side in sides:
        table.add_column(side.name)
    table.add_row("token", *(_token(side.token_id, side.text) for side in sides))
    if difference.gap is None or difference.noise is None:
        return table
    for rank, label in enumerate(("best", "second")):
        best = [side.top_two[rank] if rank < len(side.top_two) else None for side in sides]
        table.add_row(label, *("" if c is None else _token(c.token_id, c.text) for c in best))
        table.add_row("  score", *("" if c is None else _score(c) for c in best))
        table.add_row("  logit", *("" if c is None else f"{c.logit:.6f}" for c in best))
    table.add_row("its token's lead", *("" if side.lead is None else f"{side.lead:.3g}" for side in sides))
    table.add_row("gives its token", *("yes" if side.reproduced else "no" for side in sides))
    table.add_row("gap", f"{difference.gap:.3g}")
    table.add_row("logits differ by", f"{difference.noise:.3g} at most")
    return table


def _score(candidate: "Candidate") -> str:
    return "removed by a filter" if candidate.score == -math.inf else f"{candidate.score:.6f}"


def _token(token_id: int | None, text: str) -> str:
    return text if token_id is None else f"{token_id} {text!r}"
