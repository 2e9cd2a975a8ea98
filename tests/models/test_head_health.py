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
from specgen.models.head_health import TEXTS, Comparison, HeadHealth, measure_head
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


@pytest.mark.parametrize("name", ["hidden_first", "mask_first_embedding"])
def test_a_flipped_property_shows_as_the_gain_of_the_other(model: LoadedModel, name: str) -> None:
    layer = model.mtp.layers[0]  # type: ignore[union-attr]
    before = measure(model).others
    setattr(layer, name, not getattr(layer, name))
    after = measure(model).others
    gains = [(a.gain, b.gain) for a, b in zip(before.values(), after.values(), strict=True) if a.gain == -b.gain != 0]
    assert len(gains) == 1


def test_a_norm_too_many_is_told(model: LoadedModel) -> None:
    """Norms made uneven, and the output head so that all logits stay: what the head reads behind them is not its own
    any more, while before them it is.
    """
    spread = torch.randn(256, generator=torch.Generator().manual_seed(1)).exp()
    target, layer = model.target, model.mtp.layers[0]  # type: ignore[union-attr]
    with torch.no_grad():
        target.lm_head.weight.div_(spread)
        for norm in (target.norm, layer.final_norm):
            norm.weight.mul_(spread)
    other = measure(model).others["with the model's hidden states before the final norm"]
    assert other.gain > max(0.03, 3 * other.error)
    target.head_reads_normed = False
    assert "with its own output carried on before its final norm" in str(measure(model).problem)


def test_a_gain_within_noise_is_no_problem() -> None:
    for gain, error in ((0.03, 0.02), (0.005, 0.001)):
        assert HeadHealth(100, (0.5,), 0.4, {"x": Comparison(0.3, gain, error)}).problem is None
    health = HeadHealth(100, (0.5,), 0.4, {"x": Comparison(0.3, 0.03, 0.009), "y": Comparison(0.4, 0.02, 0.001)})
    assert "x, by 0.33 against 0.30" in str(health.problem)


def folder_with(folder: Path, projection: torch.Tensor) -> Path:
    folder.mkdir()
    for path in FOLDER.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[PROJECTION] = projection.to(weights[PROJECTION])
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_run_warns_of_a_broken_head_or_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_with(tmp_path / "model", torch.randn(256, 512))
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
    turned = folder_with(tmp_path / "turned", load_file(FOLDER / "model.safetensors")[PROJECTION].roll(256, 1))
    with EngineClient.create(recipe_from_settings([f"model.path={turned}", *sizes]), turned, [1]):
        pass
    assert "inputs of its projection in the other order" in caplog.text  # its weights are packed by then
