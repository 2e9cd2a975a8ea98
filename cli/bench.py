"""`specgen bench`: plain against speculative decoding as a table and as JSON. The measuring is `specgen.job.bench`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli.render import Console, show_bench
from specgen.errors import InputError, RecipeError
from specgen.model_path import ASSETS, resolve_model
from specgen.recipe import Recipe, load_recipe, recipe_from_settings
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # it brings torch
    from specgen.engine.client import EngineClient

# Without a recipe: the bundled model, every row its full length, so that both sides do the same amount of work.
_BUNDLED = {
    "model.path": "stories-7m",
    "input.path": str(ASSETS / "prompts" / "stories.jsonl"),
    "speculation.num_tokens": 3,
    "sampling.temperature": 0.0,
    "sampling.max_tokens": 128,
    "sampling.ignore_eos": True,
    "sampling.seed": 7,
}


def bench_recipe(
    recipe_path: Path | None,
    overrides: Mapping[str, object],
    *,
    sets: Sequence[str],
    num_rows: int,
    num_rounds: int,
    json_path: str | None,
) -> None:
    """Measure, print the table (to stderr if the JSON goes to stdout) and write the JSON.

    Raises: SpecgenError for whatever is wrong with recipe, model or rows.
    """
    if recipe_path is None:
        recipe = recipe_from_settings(sets, _BUNDLED | dict(overrides))
    else:
        recipe = load_recipe(recipe_path, sets, overrides)
    if recipe.speculation.num_tokens == 0:
        raise RecipeError("bench compares plain with speculative decoding: speculation.num_tokens must be at least 1")
    if recipe.model.path is None or recipe.input.path in (None, "-"):
        raise RecipeError("bench needs model.path, and input.path as a file")
    if json_path not in (None, "-") and not Path(str(json_path)).absolute().parent.is_dir():
        raise InputError("the folder of the JSON file does not exist", where=json_path)
    from specgen.job.bench import read_bench_rows, run_bench

    folder = resolve_model(recipe.model.path)
    tokenizer = Tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)

    def make_engine(side: Recipe) -> "EngineClient":
        from specgen.engine.client import EngineClient

        return EngineClient.create(side, folder, eos)

    console = Console()
    rows = read_bench_rows(recipe, num_rows)
    result = run_bench(recipe, rows, tokenizer, make_engine, num_rounds=num_rounds, on_round=console.note)
    show_bench(result, to_stderr=json_path == "-")
    if json_path is not None:
        text = json.dumps({"model": recipe.model.path, "recipe": _plain(recipe), **result.as_dict()}, indent=2)
        if json_path == "-":
            print(text)
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")


def _plain(recipe: Recipe) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.values().items()}
