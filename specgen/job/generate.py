"""`specgen.generate`: rows of a program through a recipe, as records; the same path as the command line's.

Knows how to start and end an engine around a session. Prints nothing.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen.errors import RecipeError
from specgen.generation_config import with_generation_config
from specgen.job.inputs import GivenRows
from specgen.job.session import Session
from specgen.job.target import Target
from specgen.job.writer import LineWriter
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe, recipe_from_settings
from specgen.tokenizer import Tokenizer, eos_token_ids


class _Records:
    """A sink that keeps lines until they are taken."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def write(self, lines: bytes) -> None:
        """Take whole lines."""
        self._lines.append(lines)

    def close(self) -> None:
        """Nothing is left to do."""

    def taken(self) -> Iterator[dict[str, Any]]:
        """Yield the records that came since the last call."""
        lines, self._lines = b"".join(self._lines), []
        yield from map(json.loads, lines.splitlines())


def generate(
    rows: Iterable[Mapping[str, Any] | str], recipe: Recipe | Mapping[str, Any] | str | Path
) -> Iterator[dict[str, Any]]:
    """Yield the record of every answer, as the lines of `specgen run` hold them, as they come.

    rows: objects as the lines of an input, or texts; consumed as the engine takes them, in a thread of its own. recipe:
    a file, a recipe, or a mapping of its sections ({"model": {"path": …}, …}) or key paths ({"model.path": …}). Its
    input and output paths are not used. Leaving the iteration early drops what runs.

    Raises: SpecgenError for what cannot be run at all; a row that cannot is a record with an error.
    """
    loaded = _recipe_of(recipe)
    if loaded.model.path is None:
        raise RecipeError("model.path is missing")
    folder = resolve_model(loaded.model.path)
    loaded = with_generation_config(loaded, folder)
    tokenizer = Tokenizer(folder)
    from specgen.engine.client import EngineClient

    given = GivenRows(rows, loaded.input)
    session = Session(loaded, folder, tokenizer, given, Target("-", fresh=False))
    records = _Records()
    try:
        with EngineClient.create(session.recipe, folder, eos_token_ids(folder, tokenizer)) as engine:
            with (
                LineWriter(records, ordered=loaded.output.order == "input") as writer,
                contextlib.closing(session.job(engine, writer).steps()) as steps,
            ):
                for _ in steps:
                    yield from records.taken()
            yield from records.taken()
    finally:
        session.close()


def _recipe_of(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        if recipe.sampling.seed is None:
            raise RecipeError("sampling.seed is missing", hint="load_recipe and a mapping draw one")
        return recipe
    if isinstance(recipe, Mapping):
        settings: dict[str, object] = {}
        for name, value in recipe.items():
            if isinstance(value, Mapping) and "." not in name:
                settings |= {f"{name}.{key}": item for key, item in value.items()}
            else:
                settings[name] = value
        return recipe_from_settings(overrides=settings)
    return load_recipe(recipe)
