"""A model folder's sampling defaults: taken one by one, only if the recipe says so, and never without their origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgen.cli.main import main
from specgen.errors import ModelError
from specgen.generation_config import with_generation_config
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, recipe_from_settings


def resolved(folder: Path, content: dict[str, object], *sets: str) -> Recipe:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return with_generation_config(recipe_from_settings(sets), folder)


def test_one_override_leaves_the_others(tmp_path: Path) -> None:
    """U67"""
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [5, 9]}
    recipe = resolved(tmp_path, content, "model.generation_config=use", "sampling.top_k=7")
    sampling, origins = recipe.sampling, recipe.origins
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 7, 0.95)
    assert origins["sampling.temperature"] == origins["sampling.top_p"] == "generation_config.json"
    assert origins["sampling.top_k"] == "--set"
    assert origins["sampling.min_p"] == "default"
    assert "temperature: 0.6" in recipe.to_yaml_with_origins()


def test_nothing_is_taken_as_a_rule(tmp_path: Path) -> None:
    recipe = resolved(tmp_path, {"temperature": 0.6, "num_beams": 4})
    assert recipe.sampling.temperature == 1.0 and recipe.origins["sampling.temperature"] == "default"


def test_no_sampling_means_the_likeliest_token(tmp_path: Path) -> None:
    content = {"do_sample": False, "temperature": 0.6}
    assert resolved(tmp_path, content, "model.generation_config=use").sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"num_beams": 4}, "num_beams = 4 is not supported"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_p": "high"}, "top_p"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, content: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        resolved(tmp_path, content, "model.generation_config=use")


def test_check_shows_values_with_their_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in resolve_model("stories-7m").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1}')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  path: model\n")
    assert main(["check", str(recipe)]) == 0
    assert (
        "# generation_config.json: temperature 0.6 (model.generation_config: use takes them)" in capsys.readouterr().out
    )
    assert main(["check", str(recipe), "--set", "model.generation_config=use"]) == 0
    shown = capsys.readouterr().out
    assert any("temperature: 0.6" in line and "# generation_config.json" in line for line in shown.splitlines())
