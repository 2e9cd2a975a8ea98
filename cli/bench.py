"""`specgen bench`: plain against speculative decoding as a table and as JSON. The measuring is `specgen.job.bench`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli.render import Console, show_bench, to_stdout
from specgen.cli.signals import Interrupts
from specgen.errors import RecipeError
from specgen.job.peer import PeerResult, require_transformers, run_transformers
from specgen.job.writer import check_replaceable, write_file
from specgen.model_path import ASSETS, resolve_model
from specgen.recipe import Recipe, load_recipe, recipe_from_settings
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # it brings torch
    from specgen.job.bench import BenchResult

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
    with_peer: bool = False,
) -> None:
    """Measure, print the table (to stderr if the JSON goes to stdout) and write the JSON.

    recipe_path: None is the bundled model and prompts. Over either lie `sets`, and over these the flags (`overrides`).

    Raises: SpecgenError for whatever is wrong with recipe, model or rows, KeyboardInterrupt after a signal.
    """
    if recipe_path is None:
        recipe = recipe_from_settings(sets, _BUNDLED, overrides)
    else:
        recipe = load_recipe(recipe_path, sets, overrides)
    if recipe.speculation.num_tokens == 0:
        raise RecipeError(
            "bench compares plain with speculative decoding: speculation.num_tokens must be at least 1",
            where=recipe.origins["speculation.num_tokens"],
        )
    if recipe.model.path is None or recipe.input.path in (None, "-"):
        raise RecipeError("bench needs model.path, and input.path as a file")
    if with_peer:
        _check_peer(recipe)
    if json_path is not None:
        check_replaceable(json_path, "JSON file", [str(recipe_path or "-"), str(recipe.input.path)])
    with Interrupts() as interrupts:
        result = _measure(recipe, interrupts, num_rows, num_rounds, with_peer)
    show_bench(result, to_stderr=json_path == "-")
    if json_path is not None:
        text = json.dumps({"model": recipe.model.path, "recipe": _plain(recipe), **result.as_dict()}, indent=2) + "\n"
        if json_path == "-":
            to_stdout(text)
        else:
            write_file(json_path, text, "JSON file")


def _check_peer(recipe: Recipe) -> None:
    sampling = recipe.sampling
    if sampling.temperature != 0 or not sampling.ignore_eos or sampling.max_tokens is None:
        raise RecipeError(
            "--peer compares greedy rows of one length: temperature 0, ignore_eos and max_tokens are needed"
        )
    require_transformers("--peer")


def _measure(recipe: Recipe, interrupts: Interrupts, num_rows: int, num_rounds: int, with_peer: bool) -> "BenchResult":
    interrupts.hold()  # an import that is broken off may take the process with it
    from specgen.engine.client import EngineClient
    from specgen.job.bench import read_bench_rows, run_bench
    from specgen.worker.worker import resolve_device, resolve_dtype

    interrupts.release()
    folder = resolve_model(str(recipe.model.path))
    tokenizer = Tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)

    def make_engine(side: Recipe) -> EngineClient:
        return EngineClient.create(side, folder, eos)

    def run_peer(prompts: list[list[int]]) -> PeerResult:
        device = resolve_device(recipe.model.device)
        dtype = resolve_dtype(recipe.model.dtype, device)
        assert recipe.sampling.max_tokens is not None
        return run_transformers(folder, prompts, recipe.sampling.max_tokens, dtype, device, console.note)

    console = Console()
    rows = read_bench_rows(recipe, num_rows)
    return run_bench(
        recipe,
        rows,
        tokenizer,
        make_engine,
        num_rounds=num_rounds,
        on_round=console.note,
        run_peer=run_peer if with_peer else None,
    )


def _plain(recipe: Recipe) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.values().items()}
