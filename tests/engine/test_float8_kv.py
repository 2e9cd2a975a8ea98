"""Law 1 over a KV cache in FP8: other answers than over a wide one, and the same for any K, company, chunk and pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import Harness, Row, reference
from tiny import write_checkpoint
from tiny_dense import config_of, random_head, write_folder

from specgen.sampling_params import SamplingParams

FLOAT8 = torch.float8_e4m3fn


class Model(NamedTuple):
    """A folder, that of its draft head if it has none, and the layers of its pool: target, sharing draft layers."""

    folder: Path
    head: Path | None
    pool_layers: int


def write_model(name: str, folder: Path) -> Model:
    if name == "latent":
        return Model(write_checkpoint(folder, num_nextn_predict_layers=2), None, 4)
    if name == "grouped":
        return Model(write_folder(folder, config_of("mimo")), None, 3)
    head_config = config_of("llama", num_nextn_predict_layers=1, num_key_value_heads=1)
    head = write_folder(folder / "head", head_config, random_head(head_config), file="mtp")
    return Model(write_folder(folder / "model", config_of("qwen3")), head, 2)


def rows_of(prompt_lengths: tuple[int, ...]) -> list[Row]:
    rng = random.Random(8)
    return [
        Row([rng.randrange(64) for _ in range(n)], SamplingParams(temperature=0.8 * (n % 3 > 0), max_tokens=16), seed=n)
        for n in prompt_lengths
    ]


@pytest.mark.parametrize("name", ["latent", "grouped", "second folder"])
def test_tokens_are_plain_decodings_over_the_same_cache(tmp_path: Path, name: str) -> None:
    model, rows = write_model(name, tmp_path), rows_of((1, 4, 30, 11, 57, 8))
    want = [r.token_ids for r in reference(model.folder, rows, kv_dtype=FLOAT8)]
    assert want != [r.token_ids for r in reference(model.folder, rows)]
    num_preemptions = 0
    for k, budget, seqs, blocks, asynchronous in [
        (4, 512, 16, 26, False),
        (0, 5, 16, 512, False),
        (2, 7, 3, 512, True),
    ]:
        options: dict[str, Any] = {"draft_folder": model.head if k else None, "async_scheduling": asynchronous}
        harness = Harness(
            model.folder, k=k, budget=budget, max_num_seqs=seqs, num_blocks=blocks, kv_dtype=FLOAT8, **options
        )
        results = harness.run(rows)
        assert [r.token_ids for r in results] == want, (k, budget, seqs, blocks)
        num_preemptions += harness.scheduler.num_preemptions
    assert num_preemptions
    results = harness.run(rows)
    assert [r.token_ids for r in results] == want, "behind a warm prefix cache"
    assert sum(r.num_cached_tokens for r in results) > 0


@pytest.mark.parametrize("name", ["latent", "grouped", "second folder"])
def test_the_pool_is_in_float8_and_counted_so(tmp_path: Path, name: str) -> None:
    model = write_model(name, tmp_path)
    options: dict[str, Any] = {"k": 2, "num_blocks": 20, "draft_folder": model.head}
    wide, narrow = (Harness(model.folder, kv_dtype=dtype, **options).worker for dtype in (None, FLOAT8))
    assert 4 * narrow.block_bytes == wide.block_bytes
    assert narrow.kv_caches.dtype == narrow.runner.drafter.kv_caches.dtype == FLOAT8  # type: ignore[union-attr]
    assert narrow.kv_caches.shape[0] == model.pool_layers
    own = 0 if model.head is None else narrow.runner.drafter.kv_caches.nbytes  # type: ignore[union-attr]
    assert narrow.kv_caches.nbytes + own == narrow.budget.kv == 20 * narrow.block_bytes
