"""U41: the KV that a row leaves, the draft layers' too, is that of the row alone, whatever was cached before it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from harness import Harness, Row
from tiny import write_checkpoint

from specgen.engine.request import Request
from specgen.sampling_params import SamplingParams


def kv_of_rows(harness: Harness, rows: list[Row]) -> dict[int, torch.Tensor]:
    """By seed, each row's KV at its end: `[layers, committed - 1, latent]`, gathered from its blocks."""
    found: dict[int, torch.Tensor] = {}
    release = harness.scheduler._release

    def capture(request: Request) -> None:
        blocks = harness.scheduler.kv.block_ids(request)
        if blocks and request.finish_reason is not None:
            kv = harness.worker.kv_caches[:, blocks].flatten(1, 2)
            found[request.seed] = kv[:, : request.num_tokens - 1].float()
        release(request)

    harness.scheduler._release = capture  # type: ignore[method-assign]
    harness.run(rows)
    return found


@pytest.mark.parametrize(
    ("layers", "asynchronous", "kv_dtype"),
    [*((n, a, None) for n in (1, 2, 3) for a in (False, True)), (2, True, torch.float8_e4m3fn)],
)
def test_kv_behind_a_prefix_hit_is_the_cold_kv(
    tmp_path: Path, layers: int, asynchronous: bool, kv_dtype: torch.dtype | None
) -> None:
    folder = write_checkpoint(tmp_path, num_nextn_predict_layers=layers)
    rng = random.Random(layers)
    params = SamplingParams(temperature=0.0, max_tokens=10)
    for k in (2, 4):
        shared = [rng.randrange(64) for _ in range(rng.choice([8, 16, 17]))]
        rows = [Row(shared + [rng.randrange(64) for _ in range(rng.randint(2, 9))], params, seed=i) for i in range(3)]
        cold: dict[int, torch.Tensor] = {}
        for row in rows:
            cold |= kv_of_rows(Harness(folder, k=k, prefix_caching=False, kv_dtype=kv_dtype), [row])
        for budget in (2, 5, 64):
            harness = Harness(folder, k=k, budget=budget, async_scheduling=asynchronous, kv_dtype=kv_dtype)
            harness.run(rows[:1])
            warm = kv_of_rows(harness, rows[1:])
            assert set(warm) == {1, 2}
            for seed, kv in warm.items():
                for layer in range(kv.shape[0]):
                    first = max(0, layer - harness.config.model.num_hidden_layers)  # draft layer j starts at position j
                    assert torch.equal(kv[layer, first:], cold[seed][layer, first:]), (k, budget, seed, layer)
