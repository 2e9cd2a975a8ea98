"""Law 1 on a CUDA device, in bf16, with the bundled model: the tokens are those of plain decoding alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import Harness, Repeating, Restless, Result, Row, oracle, run_rows
from tokenizers import Tokenizer

from specgen.model_path import ASSETS, resolve_model
from specgen.models import cheap_drafts
from specgen.models.cheap_drafts import CheapDrafts
from specgen.sampling_params import SamplingParams
from specgen.worker import forward_graphs, graphs
from specgen.worker.graphs import GraphMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the CPU has test_laws.py"),
]
OPTIONS = {"device": "cuda:0", "dtype": torch.bfloat16, "eos": [1], "block_size": 16, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("stories-7m")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    """500 rows: prompts of 5 to 180 tokens, some of which begin alike, and parameters of every kind."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (ASSETS / "prompts" / "stories.jsonl").read_text().splitlines()
    texts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    rng = random.Random(0)

    def prompt(i: int) -> list[int]:
        ids = list(texts[i % len(texts)])
        while rng.random() < 0.6:
            ids += rng.choice(texts)
        return ids[: rng.randint(5, 180)]

    return [
        Row(
            prompt(i),
            SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.0]),
                top_p=rng.choice([1.0, 0.95]),
                top_k=rng.choice([0, 40]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                min_p=rng.choice([0.0, 0.0, 0.05]),
                typical_p=rng.choice([1.0, 1.0, 0.9]),
                no_repeat_ngram_size=rng.choice([0, 0, 3]),
                logit_bias=rng.choice([(), ((300, 4.0), (17, -100.0))]),
                allowed_token_ids=rng.choice([None, None, tuple(range(0, 2000))]),
                bad_words_ids=rng.choice([(), ((300, 301), (14,))]),
                min_tokens=rng.choice([0, 0, 20]),
                max_tokens=rng.randint(20, 40),
            ),
            seed=i,
        )
        for i in range(500)
    ]


@pytest.fixture(scope="module")
def ref(folder: Path, rows: list[Row]) -> list[Result]:
    harness = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False, **OPTIONS)
    return [harness.run([row])[0] for row in rows]


def assert_same(got: list[Result], want: list[Result]) -> None:
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a.token_ids != b.token_ids]
    assert not different, f"{len(different)} of {len(want)} rows differ: {different[:10]}"


@pytest.mark.parametrize(
    ("k", "seqs", "budget"),
    [(0, 64, 4096), (0, 7, 64), (1, 64, 512), (1, 7, 4096), (3, 64, 64), (3, 64, 4096), (3, 7, 512), (3, 1, 4096)],
)
def test_speculative_equals_plain(
    folder: Path, rows: list[Row], ref: list[Result], k: int, seqs: int, budget: int
) -> None:
    asynchronous = budget == 4096
    got = run_rows(folder, rows, k=k, max_num_seqs=seqs, budget=budget, async_scheduling=asynchronous, **OPTIONS)
    assert_same(got, ref)


@pytest.mark.parametrize("k", [0, 3])
def test_long_steps_between_captured_ones(
    folder: Path, rows: list[Row], ref: list[Result], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_long = 0

    def run_once(run: Callable[[], object], memory: GraphMemory) -> None:
        nonlocal num_long
        num_long += 1
        graphs.run_once(run, memory)

    monkeypatch.setattr(forward_graphs, "_SMALLEST", 32)
    monkeypatch.setattr(forward_graphs, "LONG_STEP", 128)
    monkeypatch.setattr(forward_graphs, "run_once", run_once)
    got = run_rows(folder, rows, k=k, max_num_seqs=64, budget=4096, async_scheduling=True, **OPTIONS)
    assert_same(got, ref)
    assert num_long > 5


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_preemption(folder: Path, rows: list[Row], ref: list[Result], asynchronous: bool) -> None:
    harness = Harness(folder, k=3, num_blocks=60, async_scheduling=asynchronous, max_num_seqs=48, **OPTIONS)
    assert_same(harness.run(rows), ref)
    assert harness.scheduler.num_preemptions > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_another_number_of_drafts_after_every_step(
    folder: Path, rows: list[Row], ref: list[Result], asynchronous: bool
) -> None:
    restless = Restless(3, random.Random(2))
    got = run_rows(folder, rows, k=3, max_num_seqs=64, async_scheduling=asynchronous, draft_length=restless, **OPTIONS)
    assert_same(got, ref)


@pytest.mark.parametrize("k", [0, 3])
def test_steps_that_run_several_times(folder: Path, rows: list[Row], ref: list[Result], k: int) -> None:
    repeating = Repeating(8, random.Random(k))
    options = {"max_num_seqs": 64, "async_scheduling": True, "repeat_limit": repeating}
    harness = Harness(folder, k=k, **options, **OPTIONS)
    steps = harness.seen_steps()
    assert_same(harness.run(rows), ref)
    assert sum(step.times > 1 for step in steps) > 10


def test_oracle_drafts(folder: Path, rows: list[Row], ref: list[Result]) -> None:
    some = slice(0, 64)
    assert_same(run_rows(folder, rows[some], k=4, drafter=oracle(rows, ref), **OPTIONS), ref[some])


@pytest.mark.parametrize("options", [CheapDrafts(True), CheapDrafts(True, 1024, (1,))], ids=["float8", "cut"])
def test_cheap_drafts(
    folder: Path, rows: list[Row], ref: list[Result], options: CheapDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheap_drafts, "LARGE_WEIGHT", 0)
    assert_same(run_rows(folder, rows, k=3, max_num_seqs=64, cheap_drafts=options, **OPTIONS), ref)


@pytest.mark.parametrize(("k", "num_blocks"), [(1, 512), (3, 512), (3, 60)])
def test_float8_cache(folder: Path, rows: list[Row], ref: list[Result], k: int, num_blocks: int) -> None:
    options = OPTIONS | {"kv_dtype": torch.float8_e4m3fn}
    some = rows[:100]
    harness = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False, **options)
    want = [harness.run([row])[0] for row in some]
    assert [r.token_ids for r in want] != [r.token_ids for r in ref[:100]]
    assert_same(run_rows(folder, some, k=k, max_num_seqs=48, num_blocks=num_blocks, **options), want)


def test_nothing_waits_for_the_device_inside_a_step(folder: Path, rows: list[Row]) -> None:
    """A step's launches never synchronise: only reading its result does."""
    harness = Harness(folder, k=3, **OPTIONS)
    harness.run(rows[:8])
    worker = harness.worker
    execute, sample = worker.execute_model, worker.sample_tokens

    def guarded(call):  # type: ignore[no-untyped-def]
        def wrapper(*args):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return wrapper

    worker.execute_model, worker.sample_tokens = guarded(execute), guarded(sample)
    harness.run(rows[:8])


def test_log_probabilities_are_the_same_bits(folder: Path, rows: list[Row]) -> None:
    """Raw and processed ones, and those of prompts, in company and with drafts."""
    some = [
        replace(
            row,
            params=replace(
                row.params,
                logprobs=[0, 3, 20, None][i % 4],
                logprobs_mode=["raw", "processed"][i % 8 // 4],
                prompt_logprobs=[None, 2][i % 3 // 2],
                max_tokens=16,
                min_tokens=0,
            ),
        )
        for i, row in enumerate(rows[:64])
    ]
    harness = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False, **OPTIONS)
    want = [harness.run([row])[0] for row in some]
    got = run_rows(folder, some, k=3, max_num_seqs=48, budget=256, async_scheduling=True, **OPTIONS)
    assert_same(got, want)
    assert [r.logprobs for r in got] == [r.logprobs for r in want]
    assert [r.prompt_logprobs for r in got] == [r.prompt_logprobs for r in want]


def test_by_ratio_a_run_repeats_itself_and_greedy_rows_are_plain(
    folder: Path, rows: list[Row], ref: list[Result]
) -> None:
    some = slice(0, 96)
    first = run_rows(folder, rows[some], k=3, by_ratio=True, max_num_seqs=48, **OPTIONS)
    again = run_rows(folder, rows[some], k=3, by_ratio=True, max_num_seqs=48, **OPTIONS)
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    greedy = [i for i in range(96) if rows[i].params.temperature == 0]
    assert_same([first[i] for i in greedy], [ref[i] for i in greedy])
    assert sum(r.stats.accepted for r in first if r.stats is not None) > 0
