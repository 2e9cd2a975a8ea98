"""Rows with filters on the device: what they leave, and the draw, are the twins', however the threshold is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specgen.kernels import _draw, _filter_rows, _row_floors, sample_tokens
from specgen.kernels._filter_rows import Collected
from specgen.kernels.sample_tokens import (
    LogitsRows,
    Sampled,
    SamplingTables,
    Wanted,
    sample_tokens_torch,
    sample_tokens_triton,
)
from specgen.worker.states import RequestStates

INF, NAN = torch.inf, torch.nan
WANTED = Wanted(noise=True, filters=True, min_p=True, typical_p=True, keep=True)
Limits = list[tuple[float, ...]]  # k, p, min-p's reach and, unless 1, typical p of each row


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN, or too large."""
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(*args, **kwargs)
        kind = out.dtype
        return out.fill_(torch.nan if kind.is_floating_point else kind == torch.bool or torch.iinfo(kind).max)

    monkeypatch.setattr(torch, "empty", empty)


def inputs(num_rows: int, vocab: int, limits: Limits) -> tuple[LogitsRows, SamplingTables]:
    """A slot a row, without drafts; the third is greedy."""
    states = RequestStates(num_rows, 32, vocab, 1, 4, torch.device("cpu"))
    rows = torch.arange(num_rows, dtype=torch.int32)
    states.seeds[:] = torch.arange(len(states.seeds)) * 2**33 + 5
    states.temperature[:] = 1.0
    states.temperature[2:3] = 0.0
    for row, (k, p, reach, *typical) in enumerate(limits):
        states.top_k[row], states.top_p[row], states.min_p_reach[row] = int(k), p, reach
        states.typical_p[row] = typical[0] if typical else 1.0
    tables = SamplingTables(*(getattr(states, name) for name in SamplingTables._fields))
    return LogitsRows(rows, rows.long() + 9, torch.zeros(0, dtype=torch.int64), rows * 0, rows * 0), tables


def on_device(
    device: str, logits: torch.Tensor, rows: LogitsRows, tables: SamplingTables, keep: bool = True
) -> Sampled:
    moved = LogitsRows(*(x.to(device) for x in rows)), SamplingTables(*(x.to(device) for x in tables))
    return sample_tokens_triton(logits, *moved, WANTED._replace(keep=keep))


def assert_same(device: str, logits: torch.Tensor, limits: Limits, keep: bool) -> None:
    """Tokens and kept logits, bit by bit."""
    rows, tables = inputs(len(logits), logits.shape[1], limits)
    got = logits.to(device, copy=True)
    sampled = on_device(device, got, rows, tables, keep)
    want = sample_tokens_torch(logits, rows, tables, WANTED)
    assert sampled.token_ids.tolist() == want.token_ids.tolist()
    if keep:
        torch.testing.assert_close(got.cpu(), logits, rtol=0, atol=0, equal_nan=True)


def log(*probabilities: float) -> list[float]:
    return torch.tensor(probabilities).log().tolist()


# Logits (to be filled up with -inf) and limits.
ODD: list[tuple[list[float], tuple[float, ...]]] = [
    ([1.0, 3.0, 2.0], (1, 1.0, INF)),
    ([1.0, 3.0, 1.0, 1.0], (2, 1.0, INF)),  # ties at the k-th stay together
    ([0.0, -0.0, -1.0, 0.0], (1, 1.0, INF)),  # 0 and -0 tie
    (log(0.5, 0.3, 0.2), (0, 0.6, INF)),
    (log(0.5, 0.3, 0.2), (0, 0.0, INF)),  # the largest always stays
    (log(0.4, 0.2, 0.2, 0.2), (0, 0.5, INF)),
    (log(0.4, 0.3, 0.2, 0.1), (2, 0.5, INF)),  # renormalised after top-k
    (log(0.4, 0.3, 0.2, 0.1), (2, 0.6, INF)),
    (log(0.4, 0.3, 0.2, 0.1), (0, 0.95, 0.5)),
    ([INF, 5.0, INF, 1.0], (1, 0.5, INF)),
    ([-INF, -INF, -INF], (1, 0.5, 1.0)),
    ([NAN, 5.0, 1.0], (1, 1.0, INF)),
    ([NAN, 5.0, 1.0], (0, 1.0, 9.0)),
    ([NAN, 5.0, 1.0], (0, 1.0, INF)),  # off: NaN stays
    ([100.0, -200.0, -300.0], (2, 0.9999, INF)),
    ([100.0, -200.0, -300.0], (2, 1.0, INF)),
    ([1.0, 2.0], (5, 1.0, INF)),  # fewer than k finite
    ([1.0, 2.0], (5, 0.7, INF)),
    (log(0.4, 0.3, 0.2, 0.1), (0, 1.0, INF, 0.5)),
    (log(0.9, 0.06, 0.04), (0, 1.0, INF, 0.95)),
    (log(0.4, 0.3, 0.2, 0.1), (3, 0.99, 1.0, 0.3)),
    ([1.0, 1.0, 1.0], (0, 1.0, INF, 0.1)),  # equals stay together
    ([5.0, 0.0, 0.0, 0.0], (0, 1.0, INF, 0.01)),
    ([NAN, 2.0, -INF, 1.9, INF], (0, 1.0, INF, 0.5)),
    ([-INF, -INF], (0, 1.0, INF, 0.5)),
]


@pytest.mark.parametrize("keep", [True, False])
def test_by_hand(kernel_device: str, keep: bool) -> None:
    logits = torch.full((len(ODD), 8), -INF)
    for row, (values, _) in enumerate(ODD):
        logits[row, : len(values)] = torch.tensor(values)
    assert_same(kernel_device, logits, [limits for _, limits in ODD], keep)


ARRANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda logits: logits,
    "in order": lambda logits: logits.sort().values,
    "peaked": lambda logits: torch.where(torch.arange(len(logits)) % 197 == 5, logits + 12, logits),
    "two values": lambda logits: (logits > 1).float(),
    "all equal": torch.zeros_like,
    "steps": lambda logits: (logits * 4).round() / 4,
    "hardly any": lambda logits: torch.where(torch.arange(len(logits)) % 101 == 0, logits, -INF),
    "far apart": lambda logits: logits * 1e36,
    "close together": lambda logits: logits * 1e-4,
}
EVERY_KIND: Limits = [
    (0, 0.3, INF),
    (0, 0.999, INF),
    (3, 1.0, INF),
    (60, 0.9, INF),
    (900, 0.95, INF),
    (900, 1.0, INF),
    (0, 1.0, 2.0),
    (40, 0.98, 0.5),
    (0, 1.0, INF, 0.3),
    (0, 1.0, INF, 0.97),
    (0, 0.9, 3.0, 0.6),
]


@pytest.mark.parametrize(("name", "keep"), [*((name, True) for name in ARRANGED), ("random", False), ("peaked", False)])
def test_any_arrangement(kernel_device: str, name: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room and a small sample, so that rows are collected, and searched again, and searched in place."""
    monkeypatch.setattr(_filter_rows, "_MAX_COLLECTED", 64)
    monkeypatch.setattr(_filter_rows, "_SAMPLE", 128)
    row = torch.randn(1_027, generator=torch.Generator().manual_seed(4)) * 2
    assert_same(kernel_device, ARRANGED[name](row).expand(len(EVERY_KIND), -1).contiguous(), EVERY_KIND, keep)


def seen_of(monkeypatch: pytest.MonkeyPatch) -> list[Collected]:
    """Fills with what every call collects."""
    seen: list[Collected] = []
    make = Collected.empty
    monkeypatch.setattr(Collected, "empty", lambda *args: seen.append(make(*args)) or seen[-1])
    return seen


def test_what_models_give_is_not_searched_again(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a real vocabulary; all of it is collected of a small one."""
    seen = seen_of(monkeypatch)
    logits = torch.randn(6, 17_001, generator=torch.Generator().manual_seed(1)) * 3.5
    logits[1::2] += 9 * (torch.rand(3, 17_001, generator=torch.Generator().manual_seed(2)) > 0.998)  # peaked
    limits: Limits = [(50, 0.95, INF), (50, 0.95, INF), (0, 0.9, INF), (0, 0.95, INF), (0, 1.0, INF, 0.9)]
    limits += [(0, 1.0, INF, 0.5), (0, 1.0, 4.0)]
    logits = torch.cat([logits, logits[1:2]])
    rows, tables = inputs(7, 17_001, limits)
    got = logits.to(kernel_device, copy=True)
    sampled = on_device(kernel_device, got, rows, tables)
    assert seen[-1].redo.tolist() == [0] * 7
    want = sample_tokens_torch(logits, rows, tables, WANTED)
    assert sampled.token_ids.tolist() == want.token_ids.tolist() and torch.equal(got.cpu(), logits)
    assert max(seen[-1].count.tolist()[:2]) < 400


@pytest.mark.gpu
def test_a_row_alone_is_the_row_in_company(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, vocab = (1100, 20_011) if kernel_device == "cuda" else (4, 1027)
    if kernel_device == "cpu":
        monkeypatch.setattr(_filter_rows, "_MAX_COLLECTED", 64)
        monkeypatch.setattr(_filter_rows, "_SAMPLE", 128)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(7)).to(kernel_device)
    rows, tables = inputs(num_rows, vocab, [EVERY_KIND[i % len(EVERY_KIND)] for i in range(num_rows)])
    whole = logits.clone()
    sampled = on_device(kernel_device, whole, rows, tables)
    for part in (slice(0, 1), slice(1, num_rows - 1), slice(num_rows // 2, None)):
        alone = logits[part].clone()
        some = LogitsRows(
            rows.row_slots[part], rows.positions[part], rows.spec_ids, rows.spec_start[part], rows.spec_count[part]
        )
        got = on_device(kernel_device, alone, some, tables)
        assert torch.equal(alone, whole[part]) and torch.equal(got.token_ids, sampled.token_ids[part])


def test_a_rows_weight_and_mean_are_sums_without_an_order(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold is a part of the weight: a rounding that depends on who adds what would move it. Other places within
    a block, other grids and other processors in the call give the same bits, and the weight is that of the row.
    """
    seen = seen_of(monkeypatch)
    vocab = 1_300
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(vocab, generator=generator) * torch.tensor([0.2, 4.0])[torch.arange(vocab) // 700 % 2]
    row[7], row[9] = -INF, 14.0
    others = torch.cat(
        [row[b][torch.randperm(len(b), generator=generator)] for b in torch.arange(vocab).split(_row_floors._WEIGHED)]
    )
    limits: Limits = [(0, 0.9, INF), (0, 1.0, INF, 0.6)] * 2
    rows, tables = inputs(4, vocab, limits)
    tables.temperature[:] = 0.7
    logits = torch.stack([row, row, others, others])
    want = None
    for programs, penalties in ((1, False), (8192, False), (8192, True)):
        monkeypatch.setattr(_draw, "_PROGRAMS", programs)
        moved = LogitsRows(*(x.to(kernel_device) for x in rows)), SamplingTables(*(x.to(kernel_device) for x in tables))
        sample_tokens_triton(logits.to(kernel_device, copy=True), *moved, WANTED._replace(penalties=penalties))
        mass, mean = seen[-1].mass.cpu(), seen[-1].typical[1::2, 1].cpu()
        want = (mass, mean) if want is None else want
        assert torch.equal(mass, want[0]) and torch.equal(mean, want[1])
        assert len(set(mass.tolist())) == len(set(mean.tolist())) == 1
    below = (row.max() - row).double() / 0.7
    assert mass[0] == pytest.approx(float(below.neg().exp().sum()) * 2**35, rel=1e-6)
    probabilities = below.neg().softmax(0)
    assert mean[0] == pytest.approx(float((probabilities * below.clamp(max=100)).sum()), rel=1e-6)


def test_collected_in_any_order(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs append what they find as they come: the result is the same in the opposite order."""
    real = _filter_rows.finish

    def turned(best: torch.Tensor, best_id: torch.Tensor, collected: Collected, *args: Any) -> None:
        for row, count in enumerate(collected.count.tolist()):
            if count <= collected.columns.shape[1]:
                collected.columns[row, :count] = collected.columns[row, :count].flip(0)
        real(best, best_id, collected, *args)

    logits = torch.randn(len(EVERY_KIND), 1_101, generator=torch.Generator().manual_seed(5)).mul(8).round().div(4)
    rows, tables = inputs(len(logits), logits.shape[1], EVERY_KIND)
    results = []
    for finish in (real, turned):
        monkeypatch.setattr(sample_tokens, "finish", finish)
        got = logits.to(kernel_device, copy=True)
        results.append((on_device(kernel_device, got, rows, tables).token_ids.tolist(), got.cpu()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
