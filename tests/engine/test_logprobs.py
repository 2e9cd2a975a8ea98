"""Log-probabilities from the engine: those of the plain model, the same bits with drafts as without, none stale."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Result, Row, oracle, reference, run_rows
from plain_deepseek import PlainDeepseek
from safetensors.torch import load_file
from tiny import write_checkpoint

from specgen.sampling_params import SamplingParams
from specgen.worker import target_sampler
from specgen.worker.target_sampler import TargetSampler

VOCAB = 64
TOLERANCE = 5e-5  # the model itself is in float32, its logits reach 15


@pytest.fixture(scope="module")
def plain(tiny: Path) -> PlainDeepseek:
    config = json.loads((tiny / "config.json").read_text())
    return PlainDeepseek(load_file(tiny / "model.safetensors"), config, torch.float64)


def make_rows(num: int = 16, **changes: Any) -> list[Row]:
    """U32: rows that want 0, 1 or 5 tokens, or nothing, side by side; raw and processed."""
    rng = random.Random(5)
    shared = [rng.randrange(VOCAB) for _ in range(11)]
    rows = []
    for i in range(num):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 4]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logit_bias=((3, 2.0), (7, -100.0)) if i % 3 == 0 else (),
            max_tokens=rng.randint(1, 12),
            logprobs=[0, 1, 5, None][i % 4],
            logprobs_mode=rng.choice(["raw", "processed"]),
            prompt_logprobs=[None, 0, 3][i % 3],
        )
        prompt = shared[: rng.choice([0, 8, 11])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        rows.append(Row(prompt, replace(params, **changes), seed=i + 1))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows()


@pytest.fixture(scope="module")
def ref(tiny: Path, rows: list[Row]) -> list[Result]:
    return reference(tiny, rows, eos=[3])


def assert_same(got: list[Result], want: list[Result]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.token_ids, a.logprobs, a.prompt_logprobs) == (b.token_ids, b.logprobs, b.prompt_logprobs)


def test_raw_ones_are_the_models(plain: PlainDeepseek, rows: list[Row], ref: list[Result]) -> None:
    for row, result in zip(rows, ref, strict=True):
        text = row.prompt + result.token_ids
        truth = plain.logits(plain.hidden(torch.tensor(text[:-1]))).log_softmax(1) if len(text) > 1 else None
        assert truth is not None
        wanted = row.params.logprobs
        assert len(result.logprobs) == (0 if wanted is None else len(result.token_ids))
        if row.params.logprobs_mode == "raw":
            for i, entry in enumerate(result.logprobs):
                at = truth[len(row.prompt) - 1 + i]
                assert entry.token_id == result.token_ids[i]
                assert entry.logprob == pytest.approx(float(at[entry.token_id]), abs=TOLERANCE)
                assert wanted is not None
                assert [t for t, _ in entry.top] == at.topk(wanted).indices.tolist()
                assert [v for _, v in entry.top] == pytest.approx(at.topk(wanted).values.tolist(), abs=TOLERANCE)
        if row.params.prompt_logprobs is None:
            assert result.prompt_logprobs is None
            continue
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(row.prompt)
        for i, entry in enumerate(result.prompt_logprobs[1:]):
            assert entry is not None and entry.token_id == row.prompt[i + 1]
            assert entry.logprob == pytest.approx(float(truth[i][row.prompt[i + 1]]), abs=TOLERANCE)
            assert len(entry.top) == row.params.prompt_logprobs


def test_processed_ones_are_of_what_was_drawn_from(tiny: Path, plain: PlainDeepseek) -> None:
    """U34: with top_k 1, nothing but the token has a probability; with top_k 3 and a bias, three have."""
    params = SamplingParams(temperature=0.8, top_k=3, logit_bias=((5, 3.0),), max_tokens=6, logprobs=5)
    rows = [Row([i, 9], replace(params, logprobs_mode="processed"), seed=i) for i in range(8)]
    rows += [Row([i, 9], replace(params, logprobs_mode="processed", top_k=1), seed=i) for i in range(8)]
    for row, result in zip(rows, run_rows(tiny, rows, k=3), strict=True):
        logits = plain.logits(plain.hidden(torch.tensor(row.prompt + result.token_ids)))[len(row.prompt) - 1 :]
        logits[:, 5] += 3.0
        for entry, at in zip(result.logprobs, logits, strict=False):
            kept = at.topk(row.params.top_k)
            truth = (kept.values / 0.8).log_softmax(0)
            assert [t for t, _ in entry.top] == kept.indices.tolist()
            assert [v for _, v in entry.top] == pytest.approx(truth.tolist(), abs=TOLERANCE)
            assert dict(entry.top)[entry.token_id] == entry.logprob


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("drafter", ["mtp", "oracle", "anti"])
def test_drafts_change_no_bit(tiny: Path, rows: list[Row], ref: list[Result], k: int, drafter: str) -> None:
    """U32."""
    options: dict[str, Any] = {
        "mtp": {},
        "oracle": {"drafter": oracle(rows, ref)},
        "anti": {"drafter": oracle(rows, ref, lambda t: (t + 1) % VOCAB)},
    }[drafter]
    assert_same(run_rows(tiny, rows, k=k, eos=[3], async_scheduling=k != 3, **options), ref)


@pytest.mark.parametrize("options", [{"budget": 5}, {"num_blocks": 18}, {"max_num_seqs": 3}], ids=str)
def test_chunks_preemption_and_company_change_no_bit(
    tiny: Path, rows: list[Row], ref: list[Result], options: dict[str, Any]
) -> None:
    harness = Harness(tiny, k=3, eos=[3], async_scheduling=True, **options)
    assert_same(harness.run(rows), ref)
    assert "num_blocks" not in options or harness.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("most", "largest"), [(14, 7), (16, 8), (48, 21), (10**9, 21)])
def test_logits_drawn_from_in_parts_change_no_bit(
    tiny: Path, rows: list[Row], ref: list[Result], monkeypatch: pytest.MonkeyPatch, most: int, largest: int
) -> None:
    """Of 7 rows with 2 drafts each, some of which want copies of theirs: half as many rows at once."""
    monkeypatch.setattr(target_sampler, "_MOST_LOGITS", most)
    parts = []
    whole = TargetSampler._draw_part

    def counted(self: TargetSampler, hidden: torch.Tensor, *others: Any) -> Any:
        parts.append(len(hidden))
        return whole(self, hidden, *others)

    monkeypatch.setattr(TargetSampler, "_draw_part", counted)
    assert_same(run_rows(tiny, rows, k=2, eos=[3], max_num_seqs=7), ref)
    assert max(parts) == largest


@pytest.mark.parametrize("caching", [False, True])
def test_a_prompts_are_never_stale(tiny: Path, rows: list[Row], ref: list[Result], caching: bool) -> None:
    """U35: prompts that share blocks, in both orders, over a cache that is used."""
    harness = Harness(tiny, k=2, prefix_caching=caching, eos=[3])
    assert_same(harness.run(rows), ref)
    again = harness.run(rows[::-1])[::-1]
    assert_same(again, ref)
    plain_hits = sum(r.num_cached_tokens for r, row in zip(again, rows, strict=True) if r.prompt_logprobs is None)
    assert (plain_hits > 0) == caching
    assert all(r.num_cached_tokens == 0 for r in again if r.prompt_logprobs is not None)


def test_by_ratio_there_is_one_for_each_token(tiny: Path) -> None:
    rows = make_rows(temperature=0.9, logprobs=2, logprobs_mode="raw")
    for result in run_rows(tiny, rows, k=3, by_ratio=True):
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        assert all(math.isfinite(entry.logprob) for entry in result.logprobs)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_row_whose_logits_are_no_numbers_fails_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], ref: list[Result], k: int, asynchronous: bool
) -> None:
    """U15, U34: NaN at one row's third token; its tokens so far are kept, the others know nothing of it."""
    longest = max(range(len(rows)), key=lambda i: len(ref[i].token_ids))
    at = len(rows[longest].prompt) + 1
    harness = Harness(tiny, k=k, eos=[3], async_scheduling=asynchronous)
    target, states = harness.worker.runner.target, harness.worker.states
    inner = harness.worker.runner._sample
    seen: list[Any] = []

    def sample(batch: Any, hidden: torch.Tensor) -> Any:
        seen[:] = [batch]
        return inner(batch, hidden)

    compute = target.compute_logits

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        batch = seen[0] if seen else None
        if batch is not None and len(logits) == len(batch.row_slots):
            positions = batch.at_logits(batch.positions)
            own = states.seeds[batch.row_slots.long()] == rows[longest].seed
            logits[own & (positions == at)] = torch.nan
        return logits

    monkeypatch.setattr(harness.worker.runner, "_sample", sample)
    monkeypatch.setattr(target, "compute_logits", compute_logits)
    got = harness.run(rows)
    bad = got[longest]
    assert (bad.finish_reason, bad.error_code) == ("error", "nan_logits")
    assert bad.token_ids == ref[longest].token_ids[:2]
    others = [i for i in range(len(rows)) if i != longest]
    assert_same([got[i] for i in others], [ref[i] for i in others])


def test_the_models_soft_cap_holds_everywhere(tmp_path: Path, tiny: Path) -> None:
    """The same weights under a cap of 4: log-probabilities, prompts' too, are those of cap * tanh(logit / cap)."""
    weights, config = load_file(tiny / "model.safetensors"), json.loads((tiny / "config.json").read_text())
    free = PlainDeepseek(weights, config, torch.float64)
    folder = write_checkpoint(tmp_path / "capped", weights, final_logit_softcapping=4.0)
    params = SamplingParams(temperature=0.8, max_tokens=8, logprobs=2, prompt_logprobs=1)
    rows = [Row([i, 2 * i], params, seed=i) for i in range(8)]
    want = reference(folder, rows)
    assert_same(run_rows(folder, rows, k=3), want)
    for row, result in zip(rows, want, strict=True):
        text = row.prompt + result.token_ids
        logits = 4 * torch.tanh(free.logits(free.hidden(torch.tensor(text[:-1]))) / 4)
        entries = [*(result.prompt_logprobs or [])[1:], *result.logprobs]
        for at, entry in zip(logits.log_softmax(1), entries, strict=True):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(at[entry.token_id]), abs=TOLERANCE)
