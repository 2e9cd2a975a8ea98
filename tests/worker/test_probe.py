"""The probe gives the logits of a run: at every position of an answer it samples the run's own token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Row, reference
from tiny import write_checkpoint

from specgen.engine.request import EngineRequest
from specgen.job.verify import new_probe
from specgen.recipe import recipe_from_settings
from specgen.sampling_params import SamplingParams
from specgen.worker.probe import Probe

NUM_TOKENS = 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("probe"))


def probe_of(folder: Path, k: int, *sets: str) -> Probe:
    return new_probe(recipe_from_settings([f"speculation.num_tokens={k}", *sets]), folder, 40)


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=NUM_TOKENS),
    "penalties": SamplingParams(
        temperature=1.1, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, max_tokens=NUM_TOKENS
    ),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(("k", "budget"), [(3, 4096), (1, 5), (0, 4096)])
def test_every_token_of_an_answer(tiny: Path, params: SamplingParams, k: int, budget: int) -> None:
    prompt = [7, 3, 9, 3, 60, 12, 8]
    answer = reference(tiny, [Row(prompt, params, seed=99)])[0].token_ids
    request = EngineRequest(0, prompt, params, 99)
    probe = probe_of(tiny, k, f"engine.max_num_batched_tokens={budget}")
    for position, token in enumerate(answer):
        before = prompt + answer[:position]
        alone = probe.alone(request, before)
        assert alone.token_id == token
        assert int(alone.scores.argmax()) == token
        for wanted in (token, None):  # None: every place in the step is tried, and the first is given
            verifying = probe.verifying(request, before, answer[position:], wanted)
            assert torch.equal(verifying.logits, alone.logits)
            assert torch.equal(verifying.scores, alone.scores)
            assert verifying.token_id == token
    probe.close()


def test_the_drafts_before_the_wanted_row_are_tried_in_all_places(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_of(tiny, 2)
    request = EngineRequest(0, [5, 6, 7], SamplingParams(temperature=0), 1)
    steps: list[tuple[list[int], int, list[int]]] = []
    real = Probe._step

    def seen(self: Probe, asked: EngineRequest, committed: list[int], start: int, num: int, drafts: list[int]) -> None:
        steps.append((list(committed), start, list(drafts)))
        real(self, asked, committed, start, num, drafts)

    monkeypatch.setattr(Probe, "_step", seen)
    probe.verifying(request, [5, 6, 7, 20, 21, 22], [23], wanted=None)
    assert steps[1:] == [
        ([5, 6, 7, 20, 21, 22], 5, [23, -1]),
        ([5, 6, 7, 20, 21], 4, [22, 23]),
        ([5, 6, 7, 20], 3, [21, 22]),
    ]


def test_the_end_of_the_models_room(tiny: Path) -> None:
    probe = new_probe(recipe_from_settings(["engine.max_model_len=12", "speculation.num_tokens=3"]), tiny, 12)
    request = EngineRequest(0, [5, 6, 7], SamplingParams(temperature=0), 1)
    ids = [*range(5, 16)]  # 11 tokens: the twelfth is the last one there can be
    verifying = probe.verifying(request, ids, [1], wanted=None)
    assert torch.equal(verifying.logits, probe.alone(request, ids).logits)
