"""What a recipe says about exactness and cheap drafts, as the worker is told it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specgen.engine.client import EngineClient
from specgen.errors import RecipeError
from specgen.model_path import resolve_model
from specgen.models.cheap_drafts import CutHead, Float8Linear
from specgen.recipe import recipe_from_settings
from specgen.worker.config import check_float8, is_exact, resolve_kv_dtype

SIZES = ("engine.max_num_seqs=2", "engine.max_num_batched_tokens=64", "engine.max_model_len=64", "model.device=cpu")


def test_fast_is_a_gpus() -> None:
    assert is_exact("exact", torch.device("cpu")) and is_exact("exact", torch.device("cuda"))
    assert not is_exact("fast", torch.device("cuda"))
    with pytest.raises(RecipeError, match=r"engine\.exactness is fast, and on the CPU there are only exact products"):
        is_exact("fast", torch.device("cpu"))


def test_fast_on_a_cpu_is_refused_before_anything_is_loaded() -> None:
    recipe = recipe_from_settings(["model.path=stories-7m", "engine.exactness=fast", *SIZES])
    told: list[tuple[int, int]] = []
    progress = SimpleNamespace(weights=lambda *n: told.append(n), kernels=lambda *n: told.append(n))
    with pytest.raises(RecipeError, match=r"engine\.exactness"):
        EngineClient.create(recipe, resolve_model("stories-7m"), [1], progress=progress)
    assert told == []


def test_float8_needs_a_device_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8(torch.device("cpu"), "speculation.dtype")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RecipeError, match=r"speculation\.dtype is float8, and an old one does not know FP8"):
        check_float8(torch.device("cuda"), "speculation.dtype")
    with pytest.raises(RecipeError, match=r"model\.kv_dtype is float8, and an old one does not know FP8"):
        resolve_kv_dtype("float8", torch.bfloat16, torch.device("cuda"))
    assert resolve_kv_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_kv_dtype("float8", torch.bfloat16, torch.device("cuda")) == torch.float8_e4m3fn


def test_a_cut_vocabulary_keeps_the_ends_and_the_tokenizers_added_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("stories-7m"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][0], "id": i, "content": f"<{i}>"} for i in (4000, 5000)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = ["speculation.vocab_size=600", "speculation.dtype=float8", "sampling.stop_token_ids=[777]", *SIZES]
    recipe = recipe_from_settings([f"model.path={folder}", "speculation.self_test=skip", *settings])
    with EngineClient.create(recipe, folder, [1, 3000]) as engine:
        assert engine.description["exactness"] == "exact"
        model = engine._worker.model
        assert model.mtp is not None
        (head,) = model.mtp.heads
        assert isinstance(head, CutHead) and isinstance(head.lowest, Float8Linear)
        assert head.lowest.weight.shape[0] == 600
        assert head.extra_ids.tolist() == [777, 3000, 4000]  # 5000 is beyond the model's vocabulary
