"""Law 1: the tokens of a row are those of plain decoding alone, whatever the drafts, the batch, the chunks, the cache.

Bitwise, float32, on the CPU. REF is the row without drafts, alone in an engine for one row without prefix cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Repeating, Result, Row, oracle, reference, run_rows, scripted
from tiny import write_checkpoint

from specgen.engine.step import SchedulerOutput
from specgen.sampling_params import SamplingParams, merged
from specgen.stats import SpecStats
from specgen.worker.processor_needs import FewCombinations

VOCAB = 64
ALLOWED = tuple(t for t in range(VOCAB) if t % 4 == 3 or t > 40)  # with EOS and the stop id
# one token, none that can match, and three successors of each token
BAD_WORDS = ((9,), (9, 9, 9), *((t, (t * 5 + i) % VOCAB) for t in range(VOCAB) for i in (0, 1, 2)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_rows(seed: int, num: int) -> list[Row]:
    """Prompts of ragged lengths, some with shared prefixes, under every sampling parameter, greedy and random."""
    rng, more = random.Random(seed), random.Random(-seed - 1)
    shared = [rng.randrange(VOCAB) for _ in range(19)]
    rows = []
    for i in range(num):
        prompt = shared[: rng.choice([0, 0, 4, 9, 19])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=more.choice([0.0, 0.0, 0.15]),
            logit_bias=more.choice([(), (), ((3, 1.5), (7, 2.0), (11, 3.0), (20, -100.0))]),
            allowed_token_ids=more.choice([None, None, ALLOWED]),
            bad_words_ids=more.choice([(), BAD_WORDS]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            presence_penalty=rng.choice([0.0, 0.0, -0.3]),
            max_tokens=(max_tokens := rng.randint(1, 24)),
            min_tokens=more.choice([0, 0, more.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.choice([(), (7,)]),
        )
        rows.append(Row(prompt, params, seed=1000 * seed + i))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(1, 16)


@pytest.fixture(scope="module")
def ref(tiny: Path, rows: list[Row]) -> list[Result]:
    return reference(tiny, rows, eos=[3])


def assert_same(got: list[Result], want: list[Result]) -> None:
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert [(r.finish_reason, r.stop) for r in got] == [(r.finish_reason, r.stop) for r in want]


def drafters(name: str, rows: list[Row], ref: list[Result]):  # type: ignore[no-untyped-def]
    ragged = random.Random(5)
    return {
        "mtp": None,
        "oracle": oracle(rows, ref),
        "anti": oracle(rows, ref, lambda t: (t + 1) % VOCAB),
        "script": scripted(lambda seed, committed: [ragged.randrange(-1, VOCAB) for _ in range(ragged.randrange(6))]),
    }[name]


def test_the_rows_exercise_every_end(ref: list[Result]) -> None:
    ends = {(r.finish_reason, r.stop) for r in ref}
    assert {("stop", "<eos>"), ("stop", 7), ("length", None)} <= ends
    assert len({tuple(r.token_ids) for r in ref}) > 10


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafter", ["mtp", "oracle", "anti", "script"])
def test_any_draft_length_and_drafter(
    tiny: Path, rows: list[Row], ref: list[Result], k: int, asynchronous: bool, drafter: str
) -> None:
    if k == 0 and drafter != "mtp":
        pytest.skip("no drafts, no drafter")
    options = {"drafter": drafters(drafter, rows, ref)} if k else {}
    assert_same(run_rows(tiny, rows, k=k, eos=[3], async_scheduling=asynchronous, **options), ref)


CASES = [
    (k, budget, seqs, num_blocks, prefix, asynchronous)
    for k in (0, 1, 3, 5)
    for budget in (5, 64, 4096)
    for seqs in (1, 3, 16)
    for num_blocks in (18, 512)
    for prefix in (False, True)
    for asynchronous in (False, True)
]


@pytest.mark.parametrize("case", range(0, len(CASES), 4))
def test_any_chunks_company_pool_and_cache(tiny: Path, rows: list[Row], ref: list[Result], case: int) -> None:
    """A quarter of the full grid, a different quarter of each axis; a pool of 17 blocks forces preemption."""
    k, budget, seqs, num_blocks, prefix, asynchronous = CASES[case + (case // 4) % 4]
    options = {"prefix_caching": prefix, "async_scheduling": asynchronous, "num_blocks": num_blocks}
    assert_same(run_rows(tiny, rows, k=k, budget=budget, max_num_seqs=seqs, eos=[3], **options), ref)


# overrides that keep the sequence (before, gone), or its last token, out of a text
RULES = {
    "logit_bias": (1, lambda before, gone: {"logit_bias": {str(gone): -100}}),
    "allowed_token_ids": (1, lambda before, gone: {"allowed_token_ids": [t for t in range(VOCAB) if t != gone]}),
    "bad_word": (1, lambda before, gone: {"bad_words_ids": [[gone]]}),
    "bad_words": (2, lambda before, gone: {"bad_words_ids": [[60, 61, gone], [before, gone]]}),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_ruled_out_stays_out_though_it_is_drafted(tiny: Path, rule: str, temperature: float) -> None:
    """The drafts are the text that the row has without the rule, so that the rule is met at each place in a run."""
    length, overrides = RULES[rule]
    params = SamplingParams(temperature=temperature, max_tokens=24)
    plain = [Row(row.prompt, params, row.seed) for row in make_rows(9, 6)]
    free = reference(tiny, plain)
    for at in (0, 1, 4):
        ruled, sequences = [], []
        for row, result in zip(plain, free, strict=True):
            *before, gone = (row.prompt[-1:] + result.token_ids)[at : at + 2]
            ruled.append(Row(row.prompt, merged(params, overrides(before[0], gone)), row.seed))
            sequences.append([*before, gone][-length:])
        want = reference(tiny, ruled)
        for row, sequence, result, unruled in zip(ruled, sequences, want, free, strict=True):
            text = (row.prompt[-1:] + result.token_ids)[2 - length :]
            assert sequence not in [text[i : i + length] for i in range(len(text))]
            assert result.token_ids != unruled.token_ids
            assert result.token_ids[:at] == unruled.token_ids[:at] or sequence[-1] in unruled.token_ids[:at]
        for drafter in (oracle(plain, free), oracle(ruled, want), None):
            assert_same(run_rows(tiny, ruled, k=5, async_scheduling=at == 1, drafter=drafter), want)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_row_ends_before_its_least_length(tiny: Path, temperature: float) -> None:
    """The drafts are the text with EOS and stop ids in it; then another EOS, or none, ends the row."""
    params = SamplingParams(temperature=temperature, max_tokens=24)
    plain = [Row(row.prompt, params, row.seed) for row in make_rows(9, 6)]
    free = reference(tiny, plain)
    eos, stop = free[0].token_ids[2], free[1].token_ids[3]
    for least in (1, 4, 9):
        overrides = {"min_tokens": least, "stop_token_ids": [stop]}
        ruled = [Row(row.prompt, merged(params, overrides), row.seed) for row in plain]
        want = reference(tiny, ruled, eos=[eos])
        assert all(len(result.token_ids) >= least for result in want)
        assert not any({eos, stop} & set(result.token_ids[:least]) for result in want)
        assert any(result.finish_reason == "stop" for result in want)
        for drafter in (oracle(plain, free), oracle(ruled, want), None):
            got = run_rows(tiny, ruled, k=5, eos=[eos], async_scheduling=least == 4, drafter=drafter)
            assert_same(got, want)
    ignoring = [Row(row.prompt, merged(params, {"min_tokens": 9, "ignore_eos": True}), row.seed) for row in plain]
    assert_same(reference(tiny, ignoring, eos=[eos]), free)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("k", [0, 3])
def test_preemption_happens_and_changes_nothing(
    tiny: Path, rows: list[Row], ref: list[Result], k: int, asynchronous: bool
) -> None:
    harness = Harness(tiny, k=k, num_blocks=18, eos=[3], async_scheduling=asynchronous)
    assert_same(harness.run(rows), ref)
    assert harness.scheduler.num_preemptions > 0
    assert_same(harness.run(rows), ref)  # the loop is entered again, over a used pool


@pytest.mark.parametrize("drafter", ["mtp", "oracle", "anti", "script"])
@pytest.mark.parametrize(("k", "seqs", "num_blocks"), [(1, 5, 512), (3, 16, 512), (3, 16, 18), (2, 16, 24), (5, 3, 24)])
def test_steps_that_run_several_times(
    tiny: Path, rows: list[Row], ref: list[Result], k: int, seqs: int, num_blocks: int, drafter: str
) -> None:
    options = {"max_num_seqs": seqs, "num_blocks": num_blocks, "async_scheduling": True, "eos": [3]}
    repeating = Repeating(6, random.Random(k))
    harness = Harness(tiny, k=k, drafter=drafters(drafter, rows, ref), repeat_limit=repeating, **options)
    steps = harness.seen_steps()
    assert_same(harness.run(rows), ref)
    assert_repeats_are_plain(steps, least=num_blocks > 18)
    assert harness.core.num_steps == sum(step.times for step in steps)
    assert harness.scheduler.num_preemptions > 0 or seqs < 16 or num_blocks > 24


@pytest.mark.parametrize("k", [1, 3, 5])
def test_counts_of_drafts_are_the_rows_own(tiny: Path, rows: list[Row], k: int) -> None:
    """However steps are scheduled: with the drafts known to the host, a step ahead, or several at once."""

    def stats(**options: Any) -> list[SpecStats | None]:
        harness = Harness(tiny, k=k, eos=[3], max_num_seqs=7, **options)
        return [result.stats for result in harness.run(rows)]

    want = stats()
    assert sum(one.drafted for one in want if one is not None) > 50
    assert stats(async_scheduling=True) == want
    for seed in range(3):
        assert stats(async_scheduling=True, repeat_limit=Repeating(6, random.Random(seed))) == want


def test_plain_steps_that_run_several_times(tiny: Path, rows: list[Row], ref: list[Result]) -> None:
    harness = Harness(tiny, max_num_seqs=5, async_scheduling=True, eos=[3], repeat_limit=Repeating(6, random.Random(0)))
    steps = harness.seen_steps()
    assert_same(harness.run(rows), ref)
    assert_repeats_are_plain(steps, least=5)


def assert_repeats_are_plain(steps: list[SchedulerOutput], least: int) -> None:
    """So many steps ran several times, and of those with parts of prompts or new rows none."""
    repeated = [step for step in steps if step.times > 1]
    assert len(repeated) >= least
    assert all(step.num_decode_rows and not step.new_rows for step in repeated)


@pytest.mark.parametrize("limit", [0, 3])
def test_groups_of_processors_that_no_row_needs_change_nothing(
    tiny: Path, rows: list[Row], ref: list[Result], limit: int
) -> None:
    harness = Harness(tiny, k=2, max_num_seqs=5, eos=[3])
    harness.worker.runner.combinations = FewCombinations(limit)
    assert_same(harness.run(rows), ref)


@pytest.mark.parametrize("k", [0, 3])
def test_warm_equals_cold(tiny: Path, rows: list[Row], ref: list[Result], k: int) -> None:
    harness = Harness(tiny, k=k, num_blocks=300, eos=[3])
    assert_same(harness.run(rows), ref)
    warm = harness.run(rows)
    assert_same(warm, ref)
    assert sum(r.num_cached_tokens for r in warm) > sum(len(row.prompt) for row in rows) / 2


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_several_draft_layers(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], layers: int, k: int) -> None:
    folder = write_checkpoint(tmp_path_factory.getbasetemp() / f"mtp{layers}", num_nextn_predict_layers=layers)
    want = reference(folder, rows, eos=[3])
    harness = Harness(folder, k=k, budget=16, num_blocks=200, eos=[3], async_scheduling=k % 2 == 1)
    cold = harness.run(rows)
    assert_same(cold, want)
    assert_same(harness.run(rows), want)


def test_generated_rows(tiny: Path) -> None:
    """Other rows in each round, a random engine for each; every row against REF."""
    for seed in range(2, 8):
        rng = random.Random(seed)
        rows = make_rows(seed, 12)
        want = reference(tiny, rows, eos=[3])
        got = run_rows(
            tiny,
            rows,
            k=rng.randint(1, 5),
            budget=rng.choice([3, 7, 33, 4096]),
            max_num_seqs=rng.choice([2, 5, 12]),
            num_blocks=rng.choice([14, 20, 400]),
            block_size=rng.choice([4, 16]) if rng.random() < 0.5 else 8,
            eos=[3],
            async_scheduling=rng.random() < 0.5,
        )
        assert_same(got, want)
