"""The test of a draft head: what is right passes, what was loaded wrongly or is broken is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgen.engine.client import EngineClient
from specgen.errors import ModelError
from specgen.model_path import resolve_model
from specgen.models.config import read_config
from specgen.models.head_health import TEXTS, HeadHealth, measure_head
from specgen.models.loading import LoadedModel, load_model
from specgen.recipe import recipe_from_settings
from specgen.tokenizer import Tokenizer

FOLDER = resolve_model("stories-7m")
PROJECTION = "model.layers.4.eh_proj.weight"


@pytest.fixture
def model() -> LoadedModel:
    return load_model(FOLDER, read_config(FOLDER), 3, 128, torch.float32, torch.device("cpu"))


def measure(model: LoadedModel) -> HeadHealth:
    tokenizer = Tokenizer(FOLDER)
    return measure_head(model.target, model.mtp, [tokenizer.encode(text) for text in TEXTS], 3)


def test_the_bundled_head_is_well_and_left_as_it_was(model: LoadedModel) -> None:
    health = measure(model)
    assert health.problem is None
    assert all(rate > 0.3 for rate in health.rates) and health.num_positions > 200
    assert measure(model) == health
    stored = load_file(FOLDER / "model.safetensors")[PROJECTION]
    assert model.mtp is not None
    assert torch.equal(model.mtp.layers[0].eh_proj.weight, stored.float())  # type: ignore[attr-defined]


def test_the_other_order_of_the_projection_is_told(model: LoadedModel) -> None:
    weight = model.mtp.layers[0].eh_proj.weight  # type: ignore[union-attr]
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[1] // 2, 1))
    problem = measure(model).problem
    assert problem is not None and "inputs of its projection in the other order" in problem


def test_a_gain_within_noise_is_no_problem() -> None:
    assert HeadHealth(100, (0.5,), 0.4, {"x": (0.03, 0.02)}).problem is None
    assert HeadHealth(100, (0.5,), 0.4, {"x": (0.005, 0.001)}).problem is None
    assert "x, by 0.43 against 0.40" in str(HeadHealth(100, (0.5,), 0.4, {"x": (0.03, 0.009)}).problem)


def broken_folder(folder: Path) -> Path:
    folder.mkdir()
    for path in FOLDER.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[PROJECTION] = torch.randn(weights[PROJECTION].shape).bfloat16()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_run_warns_of_a_broken_head_or_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = broken_folder(tmp_path / "model")
    sizes = ["engine.max_num_seqs=2", "engine.max_num_batched_tokens=64", "engine.num_blocks=20"]
    with EngineClient.create(recipe_from_settings([f"model.path={folder}", *sizes]), folder, [1]):
        pass
    assert "it is broken, or another model's; answers are the same" in caplog.text
    caplog.clear()
    strict = recipe_from_settings([f"model.path={folder}", "speculation.self_test=strict", *sizes])
    with pytest.raises(ModelError, match="it is broken"):
        EngineClient.create(strict, folder, [1])
    for quiet in ("speculation.self_test=skip", "speculation.num_tokens=0"):
        with EngineClient.create(recipe_from_settings([f"model.path={folder}", quiet, *sizes]), folder, [1]):
            pass
    assert not caplog.text
