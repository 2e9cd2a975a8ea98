"""A scripted engine, and a folder with what is needed to run rows through it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import FakeEngine

from specgen.job.inputs import Input
from specgen.job.session import Session
from specgen.job.target import Target
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, recipe_from_settings
from specgen.stats import RunStats
from specgen.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("stories-7m"))


@pytest.fixture(scope="session")
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


class Workplace:
    """A folder with an input file, and what is needed to run it through a fake engine."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def write(self, rows: Sequence[dict[str, Any] | str | bytes]) -> None:
        """Write the input: objects as JSON, text and bytes as they are."""
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        self.input.write_bytes(b"".join(line + b"\n" for line in lines))

    def recipe(self, *sets: str) -> Recipe:
        paths = {"input.path": str(self.input), "output.path": str(self.output), "model.path": "stories-7m"}
        return recipe_from_settings([f"sampling.seed={7}", *sets], paths)

    def session(self, *sets: str, fresh: bool = True, **options: Any) -> Session:
        """Return a session over input and output, begun anew unless `fresh` is False."""
        recipe = self.recipe(*sets)
        target = Target(str(recipe.output.path), fresh=fresh)
        return Session(recipe, resolve_model("stories-7m"), self.tokenizer, Input(recipe.input), target, **options)

    def run(self, engine: FakeEngine, *sets: str, fresh: bool = True, **options: Any) -> RunStats:
        """Run the input through `engine` into the output."""
        names = ("retry_failed", "shard")
        session = self.session(*sets, fresh=fresh, **{name: options.pop(name) for name in names if name in options})
        return session.run(engine, **options)

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """Return the output lines, parsed strictly."""

        def refuse(name: str) -> None:
            raise ValueError(name)

        lines = (path or self.output).read_text(encoding="utf-8").split("\n")
        assert lines.pop() == ""
        return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture
def workplace(tmp_path: Path, tokenizer: Tokenizer) -> Workplace:
    return Workplace(tmp_path, tokenizer)
