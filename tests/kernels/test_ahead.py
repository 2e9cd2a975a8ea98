"""Weights are asked for ahead on a GPU: nothing that is computed depends on it."""

from collections.abc import Callable

import pytest
import torch

from specgen.kernels import ahead as module
from specgen.kernels.ahead import ahead_programs, reads_ahead
from specgen.kernels.mla_inputs import mla_inputs
from specgen.kernels.prepare_qkv import prepare_qkv
from specgen.kernels.rms_norm import combine_norm, rms_norm


def test_nothing_is_asked_for_on_a_cpu() -> None:
    assert reads_ahead([torch.ones(64, 64)]) is None
    assert ahead_programs(None, 1) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU's cache")
def test_ranges_are_whole_weights_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(64, 64, device="cuda"), torch.ones(1000, 64, device="cuda")
    ahead = reads_ahead([first, second, torch.ones(0, 8, device="cuda")])
    assert ahead is not None
    assert ahead.ranges.tolist() == [[first.data_ptr(), 64 * 64 * 4], [second.data_ptr(), 1000 * 64 * 4]]
    monkeypatch.setattr(module, "_BYTES", 64 * 64 * 4 + 100)
    ahead = reads_ahead([first, second])
    assert ahead is not None
    assert ahead.ranges[:, 1].tolist() == [64 * 64 * 4, 96]
    assert ahead_programs(ahead, 4) == (128, 2)
    assert ahead_programs(ahead, 4, groups=3) == (43, 2)
    assert ahead_programs(ahead, 100_000) == (0, 0)


def _norm(ahead: object) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    x, residual = (torch.randn(5, 2048, device="cuda", generator=g).bfloat16() for _ in range(2))
    return torch.stack(rms_norm(x, torch.ones_like(x[0]), 1e-5, residual, ahead))  # type: ignore[arg-type]


def _combine(ahead: object) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    rows, residual = (torch.randn(n, 2048, device="cuda", generator=g).bfloat16() for n in (15, 5))
    weights = torch.rand(5, 3, device="cuda", generator=g)
    return torch.stack(combine_norm(rows, None, weights, residual, torch.ones_like(rows[0]), 1e-5, ahead))  # type: ignore[arg-type]


def _latent(ahead: object) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    latent, q_pe = (torch.randn(*s, device="cuda", generator=g).bfloat16() for s in ((5, 576), (5, 16, 64)))
    cache, q = torch.zeros(2, 16, 576, device="cuda").bfloat16(), torch.zeros(5, 16, 576, device="cuda").bfloat16()
    position, table = torch.arange(5, device="cuda"), torch.randn(8, 64, device="cuda", generator=g)
    mla_inputs(latent, q_pe, latent[0, :512], 1e-5, position, table, True, position + 3, cache, q, ahead)  # type: ignore[arg-type]
    return torch.cat([cache.flatten(), q.flatten()])


def _heads(ahead: object) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(5, 12 * 64, device="cuda", generator=g).bfloat16()
    cache, position = torch.zeros(2, 16, 256, device="cuda").bfloat16(), torch.arange(5, device="cuda")
    table = torch.randn(8, 64, device="cuda", generator=g)
    q = prepare_qkv(qkv, position, table, position + 3, cache, 8, 2, ahead=ahead)  # type: ignore[arg-type]
    return torch.cat([cache.flatten(), q.flatten()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU's cache")
@pytest.mark.parametrize("run", [_norm, _combine, _latent, _heads])
def test_results_are_the_same(run: Callable[[object], torch.Tensor]) -> None:
    weights = [torch.ones(3000, 1000, device="cuda"), torch.ones(7, 4, device="cuda")]
    assert torch.equal(run(reads_ahead(weights)), run(None))
