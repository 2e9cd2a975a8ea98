"""The door for programs: the same records as the command line's, as they come."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specgen
from specgen.cli.main import main
from specgen.engine.client import EngineClient
from specgen.errors import RecipeError
from specgen.recipe import Recipe, load_recipe

RECIPE: dict[str, Any] = {"model": {"path": "stories-7m"}, "sampling": {"seed": 7}, "engine.max_num_seqs": 4}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, fake_engine: Any) -> list[Any]:
    made: list[Any] = []

    def create(*args: object, **_: object) -> Any:
        made.append(fake_engine())
        return made[-1]

    monkeypatch.setattr(EngineClient, "create", create)
    return made


def test_the_records_are_those_of_the_command_line(engines: list[Any], tmp_path: Path) -> None:
    rows: list[Any] = [{"id": i, "prompt": f"row {i}", "sampling": {"n": 1 + i % 2}} for i in range(20)]
    rows[5] = {"no": "prompt"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "job.yaml"
    recipe.write_text(
        f"model: {{path: stories-7m}}\nsampling: {{seed: 7}}\nengine: {{max_num_seqs: 4}}\n"
        f"input: {{path: in.jsonl}}\noutput: {{path: {tmp_path / 'out.jsonl'}}}\n"
    )
    assert main(["run", str(recipe), "-q"]) == 3
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(written) == 29
    for given in (RECIPE, recipe, str(recipe), load_recipe(recipe)):
        assert list(specgen.generate(rows, given)) == written


def test_requests_of_a_batch_are_answered_in_its_form(engines: list[Any]) -> None:
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi"}}
    first, second = specgen.generate([request, request], RECIPE | {"input.format": "openai-batch"})
    assert first["response"]["body"]["choices"][0]["text"] == "hi"
    assert "custom_id 'a' of line 2 was given before" in second["response"]["body"]["error"]["message"]


def test_rows_are_taken_as_they_are_needed_and_records_come_early(engines: list[Any]) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"text {taken}"

    records = specgen.generate(endless(), RECIPE)
    first = [next(records) for _ in range(10)]
    assert [record["text"] for record in first] == [f"text {i}" for i in range(1, 11)]
    assert taken < 1000
    records.close()  # type: ignore[attr-defined]
    assert len(engines[0].aborted) > 0


def test_what_cannot_be_run_at_all_is_raised(engines: list[Any]) -> None:
    with pytest.raises(specgen.SpecgenError, match=r"model\.path is missing"):
        list(specgen.generate(["x"], {}))
    with pytest.raises(RecipeError, match=r"did you mean 'sampling\.temperature'"):
        list(specgen.generate(["x"], {"sampling": {"temprature": 1}}))
    with pytest.raises(RecipeError, match="seed is missing"):
        list(specgen.generate(["x"], Recipe()))
    assert engines == []
