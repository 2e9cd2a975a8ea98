"""`specgen acceptance`: the ways, the rows they run, and the counts, on the tiny and the bundled model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import write_checkpoint

from specgen.cli.main import main
from specgen.engine.client import EngineClient
from specgen.engine.request import EngineRequest
from specgen.job.acceptance import ARGMAX, RATIO, SHARED, UNPROCESSED, Acceptance, measure_acceptance, ways_for
from specgen.job.verify import VerifyRow
from specgen.recipe import Recipe, recipe_from_settings
from specgen.sampling_params import SamplingParams
from specgen.worker.speculator import Drafting

ROOT = Path(__file__).parent.parent.parent


def rows_of(params: SamplingParams, num: int = 12) -> list[VerifyRow]:
    return [VerifyRow(f"r{i}", i + 1, EngineRequest(i, [i, 7, 3 * i % 60], params, 70 + i)) for i in range(num)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("acceptance"))


def measured(folder: Path, params: SamplingParams, temperatures: list[float | None]) -> list[Acceptance]:
    recipe = recipe_from_settings(["speculation.num_tokens=2", "engine.num_blocks=200"])

    def make_engine(side: Recipe, drafting: Drafting) -> EngineClient:
        return EngineClient.create(side, folder, (), drafting=drafting)

    return measure_acceptance(recipe, temperatures, lambda _: rows_of(params), make_engine, on_progress=lambda _: None)


def test_the_ways_that_can_differ() -> None:
    def names(**params: Any) -> list[str]:
        return [way.name for way in ways_for(rows_of(SamplingParams(**params)))]

    assert names(temperature=0.5) == [SHARED.name, ARGMAX.name, RATIO.name]
    assert names(temperature=0.0, top_p=0.5) == [SHARED.name, ARGMAX.name, RATIO.name]
    assert names(temperature=0.5, top_p=0.5) == [SHARED.name, UNPROCESSED.name, ARGMAX.name, RATIO.name]
    assert UNPROCESSED.name in names(temperature=0.0, presence_penalty=0.5)


def test_counts_of_every_way(tiny: Path) -> None:
    params = SamplingParams(temperature=0.3, max_tokens=12, allowed_token_ids=(1, 2, 3, 4))
    found = measured(tiny, params, [None, 0.0])
    assert [(one.temperature, one.way) for one in found] == [
        (temperature, way) for temperature in (None, 0.0) for way in ("shared", "unprocessed", "argmax", "ratio")
    ]
    for one in found:
        assert one.spec.emitted == 12 * 12 and one.rows == 12
        assert 0 < one.spec.drafted >= one.spec.accepted
    greedy = found[4:]
    assert greedy[0].spec == greedy[2].spec == greedy[3].spec, "at temperature 0 no noise tells them apart"
    assert greedy[0].spec != greedy[1].spec, "drafts that ignore the list of allowed tokens are others"
    strict = found[0].as_dict()
    assert strict["tokens"] == 144 and len(strict["acceptance_per_pos"]) == 2  # type: ignore[arg-type]
    json.dumps([one.as_dict() for one in found], allow_nan=False)


def test_shared_noise_is_near_ratio_and_beats_argmax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled model at temperature 1, as the command counts it."""
    out = tmp_path / "counts.json"
    sets = ["sampling.top_p=1", "sampling.seed=7", "sampling.max_tokens=48"]
    args = ["acceptance", str(ROOT / "recipes" / "quickstart.yaml"), "--rows", "16", "-t", "1", "--json", str(out)]
    assert main([*args, *(word for one in sets for word in ("--set", one))]) == 0
    printed = capsys.readouterr().out
    results = {one["way"]: one for one in json.loads(out.read_text())["results"]}
    lengths = {way: one["mean_accepted_length"] for way, one in results.items()}
    assert set(lengths) == {"shared", "argmax", "ratio"}
    assert lengths["shared"] > 1.05 * lengths["argmax"]
    assert lengths["shared"] > 0.9 * lengths["ratio"]
    assert printed.split()[:3] == ["temperature", "drafts", "tokens/step"]
    assert all(way in printed for way in lengths)


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    run = functools.partial(main, ["acceptance", recipe, "--set", "speculation.num_tokens=0"])
    assert run() == 2
    assert "speculation.num_tokens is 0" in capsys.readouterr().err
    assert main(["acceptance", recipe, "--json", recipe]) == 2
    assert main(["verify", recipe, "--set", "speculation.method=ratio"]) == 2
    assert "does not promise the plain ones" in capsys.readouterr().err
