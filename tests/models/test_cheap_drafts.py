"""Cheap draft layers: what is replaced, what is shared, what is kept; a cut head's logits; tokens that don't change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Row, reference
from tiny import CONFIG, random_weights, write_checkpoint

from specgen.kernels.float8_linear import FLOAT8, dequantize_rows, quantize_rows
from specgen.models import cheap_drafts
from specgen.models.cheap_drafts import AS_LOADED, CheapDrafts, CutHead, Float8Linear
from specgen.models.config import read_config
from specgen.models.deepseek_v3 import MoE
from specgen.models.layers import Linear
from specgen.models.loading import LoadedModel, load_model
from specgen.sampling_params import SamplingParams

VOCAB = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), num_nextn_predict_layers=2)


@pytest.fixture(scope="module")
def own_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 brings a head of its own, layer 1 a copy of the target's."""
    weights = random_weights({**CONFIG, "num_nextn_predict_layers": 2})
    for i, factor in ((2, 2.0), (3, 1.0)):
        weights[f"model.layers.{i}.shared_head.head.weight"] = weights["lm_head.weight"] * factor
    folder = tmp_path_factory.mktemp("own")
    return write_checkpoint(folder, weights, num_nextn_predict_layers=2)


def load(folder: Path, options: CheapDrafts = AS_LOADED) -> LoadedModel:
    return load_model(folder, read_config(folder), 2, 64, torch.float32, torch.device("cpu"), cheap_drafts=options)


def num_bytes(*modules: Any) -> int:
    seen = {id(p): p.numel() * p.element_size() for m in modules for p in m.parameters()}
    return sum(seen.values())


def test_nothing_is_replaced_unless_asked(tiny: Path) -> None:
    model = load(tiny)
    assert model.mtp is not None
    assert all(head is model.target.lm_head for head in model.mtp.heads)
    assert not any(isinstance(m, Float8Linear | CutHead) for m in model.mtp.modules())
    assert all(m.scales is None for m in model.mtp.modules() if isinstance(m, MoE))


def test_float8_is_the_draft_layers_own_and_rounded_from_what_was_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheap_drafts, "LARGE_WEIGHT", 48 * 96)  # the projection 2H -> H, nothing smaller
    plain, cheap = load(tiny), load(tiny, CheapDrafts(float8=True))
    assert plain.mtp is not None and cheap.mtp is not None
    for ours, theirs in zip(cheap.target.modules(), plain.target.modules(), strict=True):
        assert type(ours) is type(theirs)  # the target is as it was
    for name, module in cheap.mtp.layers.named_modules():
        if name.endswith("wide"):
            continue
        as_loaded = plain.mtp.layers.get_submodule(name)
        if isinstance(module, MoE):
            assert module.w13.dtype == module.w2.dtype == FLOAT8 and module.scales is not None
            assert torch.equal(module.w13.float(), quantize_rows(as_loaded.w13).values.float())
            assert torch.equal(module.scales.w2, quantize_rows(as_loaded.w2).scale)
        if name.endswith("eh_proj"):
            assert isinstance(module, Float8Linear)
            assert torch.equal(module.rounded.values.float(), quantize_rows(as_loaded.weight).values.float())
        elif name.endswith("o_proj"):
            assert type(module) is Linear
    heads = list(cheap.mtp.heads)
    assert heads[0] is heads[1], "layers with one head share its copy"
    assert heads[0].wide.weight.data_ptr() == cheap.target.lm_head.weight.data_ptr()


def test_few_rows_take_float8_and_many_the_loaded_weight(tiny: Path) -> None:
    model = load(tiny, CheapDrafts(float8=True))
    assert model.mtp is not None
    hidden = torch.randn(65, 48)
    rounded = dequantize_rows(quantize_rows(model.target.lm_head.weight), torch.float32)
    few, many = model.mtp.compute_logits(0, hidden[:64]), model.mtp.compute_logits(0, hidden)
    torch.testing.assert_close(few, hidden[:64] @ rounded.T)
    assert torch.equal(many, model.target.lm_head(hidden).float())
    assert not torch.equal(few, many[:64])


def test_a_head_of_its_own_is_held_in_float8_alone(own_heads: Path) -> None:
    plain, cheap = load(own_heads), load(own_heads, CheapDrafts(float8=True, vocab_size=40))
    assert plain.mtp is not None and cheap.mtp is not None
    own, shared = (head.lowest for head in cheap.mtp.heads)
    assert own.wide is None and shared.wide is not None
    assert own.rounded.values.untyped_storage().nbytes() == 40 * 48
    whole = num_bytes(plain.mtp, plain.target) - num_bytes(cheap.mtp, cheap.target)
    assert whole > 64 * 48 * 4, "neither the whole head nor the experts stay behind"
    hidden = torch.randn(70, 48)
    want = hidden @ dequantize_rows(quantize_rows(plain.mtp.heads[0].weight), torch.float32).T
    torch.testing.assert_close(cheap.mtp.compute_logits(0, hidden)[:, :40], want[:, :40])


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("extra", [(), (3, 17, 50, 63, 99)])
def test_a_cut_head_gives_the_logits_of_the_kept_ids_and_no_others(
    tiny: Path, extra: tuple[int, ...], float8: bool
) -> None:
    plain = load(tiny, CheapDrafts(float8))
    cut = load(tiny, CheapDrafts(float8, 17, extra))
    assert plain.mtp is not None and cut.mtp is not None
    for rows in (1, 7, 70):
        hidden = torch.randn(rows, 48)
        want, got = plain.mtp.compute_logits(1, hidden), cut.mtp.compute_logits(1, hidden)
        assert got.dtype == torch.float32 and got.shape == (rows, VOCAB)
        kept = [i for i in range(VOCAB) if i < 17 or i in extra]
        others = [i for i in range(VOCAB) if i not in kept]
        torch.testing.assert_close(got[:, :17], want[:, :17])
        # the few others are products of the weights as they were loaded
        exact = model_logits(plain, hidden) if float8 else want
        torch.testing.assert_close(got[:, kept[17:]], exact[:, kept[17:]])
        assert torch.isneginf(got[:, others]).all()
    head = cut.mtp.heads[0]
    assert head is cut.mtp.heads[1]
    if not float8:
        assert head.lowest.weight.data_ptr() == cut.target.lm_head.weight.data_ptr(), "a slice, not a copy"


def model_logits(model: LoadedModel, hidden: torch.Tensor) -> torch.Tensor:
    return model.target.lm_head(hidden).float()


def test_a_part_as_large_as_the_vocabulary_is_all_of_it(tiny: Path) -> None:
    model = load(tiny, CheapDrafts(vocab_size=64))
    assert model.mtp is not None and all(head is model.target.lm_head for head in model.mtp.heads)


ROWS = 24


@pytest.fixture(scope="module")
def plain(tiny: Path) -> tuple[list[Row], list[list[int]]]:
    rng = random.Random(5)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.9, max_tokens=20),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, max_tokens=20),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, min_tokens=8, stop_token_ids=(60, 61), max_tokens=20),
        # none of these ids is in the cut vocabulary: drafts can't be right, and tokens are
        SamplingParams(temperature=0.7, allowed_token_ids=(30, 31, 40, 41, 42), max_tokens=20),
    ]
    rows = [
        Row([rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))], kinds[i % len(kinds)], seed=i)
        for i in range(ROWS)
    ]
    return rows, [result.token_ids for result in reference(tiny, rows, eos=[62])]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "options",
    [CheapDrafts(True), CheapDrafts(False, 20, (60, 61, 62)), CheapDrafts(True, 20, (62,))],
    ids=["float8", "cut", "both"],
)
def test_law_cheap_drafts_change_no_token(
    tiny: Path,
    plain: tuple[list[Row], list[list[int]]],
    options: CheapDrafts,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cheap_drafts, "LARGE_WEIGHT", 0)
    rows, want = plain
    harness = Harness(tiny, k=k, cheap_drafts=options, eos=[62], max_num_seqs=5, async_scheduling=k == 3, budget=37)
    got = harness.run(rows)
    assert [result.token_ids for result in got] == want
    assert sum(result.stats.accepted for result in got if result.stats is not None) > 0
    model = harness.worker.model
    assert model.mtp is not None
    assert any(isinstance(m, Float8Linear) for m in model.mtp.layers.modules()) is options.float8
