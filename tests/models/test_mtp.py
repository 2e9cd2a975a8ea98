"""Law 3, drafter: draft logits of several chained steps equal a plain-torch MTP over the whole committed sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draft_chains import Recorder, assert_chains_equal, record
from harness import Harness, Row
from plain_deepseek import PlainDeepseek
from safetensors.torch import load_file
from tiny import CONFIG, random_weights, write_checkpoint

from specgen.model_path import resolve_model
from specgen.models.mtp import MTPLayer
from specgen.sampling_params import SamplingParams


def plain(folder: Path) -> PlainDeepseek:
    config = json.loads((folder / "config.json").read_text())
    return PlainDeepseek(load_file(folder / "model.safetensors"), config, torch.float64)


def rows(num: int) -> list[Row]:
    g = torch.Generator().manual_seed(8)
    lengths = [1, 2, 3, 9, 26][:num]
    return [
        Row(torch.randint(0, 64, (n,), generator=g).tolist(), SamplingParams(temperature=0.0, max_tokens=14), seed=n)
        for n in lengths
    ]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("budget", [7, 512])
def test_chained_drafts_equal_the_plain_mtp(tmp_path: Path, layers: int, budget: int) -> None:
    """U01, U03, U08: the prompt is covered, chunked or not; the carried state is right; layers take turns."""
    folder = write_checkpoint(tmp_path, num_nextn_predict_layers=layers)
    records = record(folder, rows(5), k=4, budget=budget)
    assert assert_chains_equal(plain(folder), records, every=2) > 40


def test_bundled_model_drafts_equal_the_plain_mtp() -> None:
    folder = resolve_model("stories-7m")
    g = torch.Generator().manual_seed(2)
    prompt = [0, *torch.randint(3, 4096, (37,), generator=g).tolist()]
    records = record(folder, [Row(prompt, SamplingParams(temperature=0.0, max_tokens=16))], k=3, max_model_len=128)
    assert assert_chains_equal(plain(folder), records) > 12


def test_drafts_behind_a_prefix_hit_equal_the_plain_mtp(tmp_path: Path) -> None:
    """U41, U43: another row's continuation is not in the cached draft KV; several layers recompute what they carry."""
    for layers in (1, 2):
        folder = write_checkpoint(tmp_path / str(layers), num_nextn_predict_layers=layers)
        shared = [3, 1, 4, 1, 5, 9, 2, 6]
        first, second = Row([*shared, 10, 11, 12], seed=1), Row([*shared, 20, 21, 22], seed=2)
        params = SamplingParams(temperature=0.0, max_tokens=10)
        first.params = second.params = params
        harness = Harness(folder, k=3, max_num_seqs=1)
        harness.run([first])
        recorder = Recorder(harness)
        result = harness.run([second])[0]
        assert result.num_cached_tokens == 4, "the second block is followed by another token"
        assert_chains_equal(plain(folder), recorder.records)


def test_position_zero_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U01: the property is used, and only what sees position 0 depends on it."""
    folder = write_checkpoint(tmp_path)
    oracle = plain(folder)
    ids = torch.tensor([5, 6, 7, 8])
    hidden = oracle.hidden(ids)
    masked = oracle.mtp(0, hidden, torch.tensor([6, 7, 8, 9]))
    unmasked = oracle.mtp(0, hidden, torch.tensor([6, 7, 8, 9]), mask_first=False)
    assert not torch.allclose(masked[0], unmasked[0])
    records = record(folder, [Row([5], SamplingParams(temperature=0.0, max_tokens=3))], k=1)
    monkeypatch.setattr(MTPLayer, "mask_first_embedding", False)
    flipped = record(folder, [Row([5], SamplingParams(temperature=0.0, max_tokens=3))], k=1)
    assert records[0][0] == flipped[0][0]
    assert not torch.allclose(records[0][1][0], flipped[0][1][0])


def test_the_second_layer_makes_the_second_draft(tmp_path: Path) -> None:
    """U07: perturbing layer 1 changes draft 2 and not draft 1."""
    config = CONFIG | {"num_nextn_predict_layers": 2}
    weights = random_weights(config)
    changed = dict(weights)
    name = "model.layers.3.eh_proj.weight"
    changed[name] = weights[name].flip(0)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    first, second = (
        record(write_checkpoint(tmp_path / n, w, num_nextn_predict_layers=2), [Row([5, 6, 7], params)], k=2)[0][1]
        for n, w in (("a", weights), ("b", changed))
    )
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_own_head_and_embedding_are_kept(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    own = torch.randn(64, 48, generator=torch.Generator().manual_seed(9))
    weights["model.layers.2.shared_head.head.weight"] = own
    weights["model.layers.2.embed_tokens.weight"] = own.flip(0).contiguous()
    folder = write_checkpoint(tmp_path, weights)
    harness = Harness(folder, k=2)
    mtp = harness.worker.model.mtp
    assert mtp is not None
    assert torch.equal(mtp.heads[0].weight, own)
    assert torch.equal(mtp.embed_tokens.weight, own.flip(0))
    shared = Harness(write_checkpoint(tmp_path / "shared"), k=2).worker.model
    assert shared.mtp is not None
    assert shared.mtp.heads[0] is shared.target.lm_head
