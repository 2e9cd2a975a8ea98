"""The peer generates what the engine does, for few rows too, and is refused where it is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from harness import Row, run_rows
from tiny import write_checkpoint

from specgen.errors import RecipeError
from specgen.job.peer import require_transformers, run_transformers
from specgen.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("num_rows", "most_rows", "sizes"), [(3, None, [3]), (3, 1, [1]), (20, None, [16, 32]), (20, 16, [16])]
)
def test_greedy_rows_are_the_engines(tmp_path: Path, num_rows: int, most_rows: int | None, sizes: list[int]) -> None:
    folder = write_checkpoint(tmp_path)
    prompts = [[(7 * i + j) % 64 for j in range(1 + i % 5)] for i in range(num_rows)]
    told: list[str] = []
    peer = run_transformers(folder, prompts, 6, torch.float32, torch.device("cpu"), told.append, most_rows)
    rows = [Row(prompt, SamplingParams(temperature=0.0, max_tokens=6)) for prompt in prompts]
    assert peer.token_ids == [result.token_ids for result in run_rows(folder, rows, k=2)]
    assert list(peer.tokens_per_second) == sizes
    assert peer.best_batch_size in sizes
    assert len(told) == len(sizes)


def test_without_the_package_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"--peer: the package transformers is not installed"):
        require_transformers("--peer")
