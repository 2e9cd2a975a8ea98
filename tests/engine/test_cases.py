"""What users of such engines report, case by case, on the tiny model: bitwise, float32, on the CPU.

REF is the row without drafts, alone, nothing shared. ORACLE proposes REF's own continuation, ANTI what REF never picks,
SCRIPT what the test says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Result, Row, oracle, reference, run_rows, scripted
from tiny import write_checkpoint

from specgen.engine.kv_blocks import hash_block
from specgen.sampling_params import SamplingParams
from specgen.stats import SpecStats
from specgen.worker.states import RequestStates
from specgen.worker.worker import DrafterFactory

VOCAB = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def prompts(seed: int, num: int, longest: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def rows_of(prompts_: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[Row]:
    return [Row(prompt, params, seed=100 + i) for i, prompt in enumerate(prompts_)]


def ids(results: Sequence[Result]) -> list[list[int]]:
    return [r.token_ids for r in results]


def stats(result: Result) -> SpecStats:
    assert result.stats is not None
    return result.stats


def other(token: int) -> int:
    return (token + 1) % VOCAB


def accepting(rows: Sequence[Row], ref: Sequence[Result], lengths: Callable[[int, int], int]) -> DrafterFactory:
    """Drafts right for `lengths(seed, tokens so far)` positions, then wrong."""
    texts = {row.seed: row.prompt + result.token_ids for row, result in zip(rows, ref, strict=True)}

    def propose(seed: int, committed: list[int]) -> list[int]:
        rest = texts.get(seed, [])[len(committed) :]
        right = lengths(seed, len(committed))
        return rest[:right] + [other(t) for t in rest[right:]]

    return scripted(propose)


# U09, U14, U17: rows do not touch each other


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_acceptance_does_not_depend_on_company(tiny: Path, asynchronous: bool) -> None:
    """U09: counts by position of a row alone, in 8, in 16, and from its second time in a used slot."""
    rows = rows_of(prompts(1, 16), SamplingParams(temperature=0.7, max_tokens=12))
    options: dict[str, Any] = {"k": 3, "prefix_caching": False, "async_scheduling": asynchronous}
    harness = Harness(tiny, max_num_seqs=1, **options)
    alone = [harness.run([row])[0] for row in rows]
    in_8 = run_rows(tiny, rows, max_num_seqs=8, **options)
    in_16 = run_rows(tiny, rows, max_num_seqs=16, **options)
    assert [r.stats for r in alone] == [r.stats for r in in_8] == [r.stats for r in in_16]
    total = sum(stats(r).accepted for r in alone)
    assert 0 < total < sum(stats(r).drafted for r in alone), "both outcomes happen"


def test_rows_with_other_accept_lengths_and_parameters_side_by_side(tiny: Path) -> None:
    """U14: accept lengths 0, 1, 2, 3 take turns, shifted from row to row."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=1.0, max_tokens=30),
        SamplingParams(temperature=1.0, top_k=4, max_tokens=30),
        SamplingParams(
            temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.6, max_tokens=30
        ),
    ]
    rows = [Row(prompt, p, seed=i) for i, (prompt, p) in enumerate(zip(prompts(2, 4), params, strict=True), 1)]
    ref = reference(tiny, rows)
    turn: dict[int, int] = {}

    def lengths(seed: int, _: int) -> int:
        turn[seed] = turn.get(seed, seed - 1) + 1
        return turn[seed] % 4

    got = run_rows(tiny, rows, k=3, drafter=accepting(rows, ref, lengths))
    assert ids(got) == ids(ref)
    for result in got:
        made, kept = stats(result).drafted_per_pos, stats(result).accepted_per_pos
        assert made[2] > kept[2] > 0 and made[0] > kept[0] > kept[1] > kept[2]


def test_ragged_drafts_with_placeholders(tiny: Path) -> None:
    """U17: 3, 0 and 1 drafts in one batch; a placeholder is neither read, counted as a draft nor emitted."""
    rows = rows_of(prompts(3, 3))
    ref = reference(tiny, rows)
    num = {row.seed: n for row, n in zip(rows, (3, 0, 1), strict=True)}
    for behind in ([], [-1], [-1, 5]):
        texts = {row.seed: row.prompt + r.token_ids for row, r in zip(rows, ref, strict=True)}

        def propose(seed: int, committed: list[int], behind: list[int] = behind, texts: Any = texts) -> list[int]:
            return texts.get(seed, [])[len(committed) :][: num.get(seed, 0)] + behind

        for asynchronous in (False, True):
            got = run_rows(tiny, rows, k=3, drafter=scripted(propose), async_scheduling=asynchronous)
            assert ids(got) == ids(ref)
            assert [stats(r).accepted_per_pos[1:2] not in ([], [0]) for r in got] == [True, False, False]
            if not asynchronous:
                assert [stats(r).drafted > 0 for r in got] == [True, False, True]


# U13, U19, U20: processors hold at every position


def test_a_token_outside_top_k_is_never_emitted(tiny: Path) -> None:
    """U13: what is emitted at each place is one of the target's two likeliest, though the third is proposed."""
    params = SamplingParams(temperature=1.5, top_k=2, max_tokens=7)
    rows = [Row([7, 8, 9], params, seed=i) for i in range(1, 31)]
    top: dict[tuple[int, ...], list[int]] = {}
    probe = Harness(tiny, prefix_caching=False)
    inner = probe.worker.model.target.compute_logits
    seen: list[torch.Tensor] = []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = inner(hidden)
        seen.append(logits.clone())
        return logits

    probe.worker.model.target.compute_logits = compute_logits  # type: ignore[method-assign]

    def ranked(committed: list[int]) -> list[int]:
        """The three likeliest tokens after these."""
        key = tuple(committed)
        if key not in top:
            seen.clear()
            probe.run([Row(committed, SamplingParams(temperature=0.0, max_tokens=1))])
            top[key] = seen[-1][0].topk(3).indices.tolist()
        return top[key]

    got = run_rows(tiny, rows, k=3, drafter=scripted(lambda _, committed: [ranked(committed)[2]] * 3))
    assert ids(got) == ids(reference(tiny, rows))
    assert sum(stats(r).accepted for r in got) == 0 < sum(stats(r).drafted for r in got)
    second = 0
    for row, result in zip(rows, got, strict=True):
        for n, token in enumerate(result.token_ids):
            allowed = ranked(row.prompt + result.token_ids[:n])[:2]
            assert token in allowed
            second += token == allowed[1]
    assert second > 20, "both of the two are drawn"


PENALTIES = {
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 1.5},
    "rewards": {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": -1.0},
}


@pytest.fixture(scope="module", params=PENALTIES)
def penalised(tiny: Path, request: pytest.FixtureRequest) -> tuple[list[Row], list[Result]]:
    """Rows under one penalty, at T = 0 and above, and their REF, in which it matters."""
    rows, bare = [], []
    for i, prompt in enumerate(prompts(4, 6), 1):
        params = SamplingParams(temperature=0.0 if i % 2 else 0.8, max_tokens=20)
        bare.append(Row(prompt, params, seed=i))
        rows.append(Row(prompt, replace(params, **PENALTIES[request.param]), seed=i))
    ref = reference(tiny, rows)
    assert ids(ref) != ids(reference(tiny, bare))
    return rows, ref


@pytest.mark.parametrize("drafter", ["mtp", "oracle", "anti"])
def test_penalties_hold_at_every_position(tiny: Path, penalised: tuple[list[Row], list[Result]], drafter: str) -> None:
    """U19."""
    rows, ref = penalised
    options: dict[str, Any] = {
        "mtp": {},
        "oracle": {"drafter": oracle(rows, ref)},
        "anti": {"drafter": oracle(rows, ref, other)},
    }[drafter]
    assert ids(run_rows(tiny, rows, k=4, **options)) == ids(ref)


def test_presence_and_frequency_look_at_the_output_only(tiny: Path) -> None:
    """U19: a prompt of one token over and over leaves the first token as it is; repetition does not."""
    first = reference(tiny, [Row([x] * 2, replace(GREEDY, max_tokens=1)) for x in range(VOCAB)])
    told = [x for x in range(VOCAB) if first[x].token_ids == [x]]
    assert told, "some token is followed by itself"
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        rows = [Row([x] * 2, replace(GREEDY, max_tokens=1, **penalty), seed=x) for x in range(VOCAB)]
        assert ids(reference(tiny, rows)) == ids(first)
    rows = [Row([x] * 2, replace(GREEDY, max_tokens=1, repetition_penalty=50.0), seed=x) for x in told]
    assert all(r.token_ids != [x] for x, r in zip(told, reference(tiny, rows), strict=True))


def test_a_rejected_draft_leaves_no_trace_in_the_counts(tiny: Path) -> None:
    """U20: [A, A, A] proposed all along; after every step the counts are those of the committed output."""
    params = SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=3.0, frequency_penalty=0.1)
    rows = rows_of(prompts(5, 4), params)
    liked = ids(reference(tiny, rows))
    wishes = {row.seed: tokens for row, tokens in zip(rows, liked, strict=True)}
    num_prompt = {row.seed: len(row.prompt) for row in rows}
    states: RequestStates
    compared = 0

    def propose(seed: int, committed: list[int]) -> list[int]:
        nonlocal compared
        if seed not in wishes:
            return []  # the step that measures memory
        output = committed[num_prompt[seed] :]
        slot = next(s for s in range(4) if int(states.seeds[s]) == seed)
        want = torch.bincount(torch.tensor(output), minlength=VOCAB)
        assert torch.equal(states.output_counts[slot].long(), want)
        words = states.prompt_mask[slot].tolist()
        bits = {v for v in range(VOCAB) if words[v // 32] >> v % 32 & 1}
        assert bits == set(committed[: num_prompt[seed]])
        compared += 1
        n = len(output)
        return [wishes[seed][n]] * 3 if n < len(wishes[seed]) else [0] * 3

    harness = Harness(tiny, k=3, max_num_seqs=4, drafter=scripted(propose))
    states = harness.worker.states
    got = harness.run(rows)
    assert ids(got) == liked and compared > 20
    assert sum(stats(r).accepted_per_pos[0] for r in got) > 20
    assert sum(stats(r).accepted_per_pos[1] for r in got) < sum(stats(r).accepted_per_pos[0] for r in got) / 4


# U24, U26, U28, U30, U31: how a row ends


@pytest.fixture(scope="module")
def distinct(tiny: Path) -> tuple[Row, list[int]]:
    """A greedy row and its continuation, whose first 8 tokens all differ."""
    for seed in range(200):
        row = Row(prompts(seed, 1)[0], GREEDY, seed=seed)
        tokens = reference(tiny, [row])[0].token_ids
        if len(set(tokens[:8])) == 8:
            return row, tokens
    raise AssertionError("no such row")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["eos", "stop id"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_stop_inside_a_run_ends_the_row_there(
    tiny: Path, distinct: tuple[Row, list[int]], at: int, kind: str, asynchronous: bool
) -> None:
    """U24."""
    row, tokens = distinct
    end = tokens[at]
    ended = Row(row.prompt, replace(row.params, stop_token_ids=() if kind == "eos" else (end,)), row.seed)
    for k in range(7):
        got = run_rows(
            tiny,
            [ended],
            k=k,
            eos=[end] if kind == "eos" else [],
            async_scheduling=asynchronous,
            **({"drafter": oracle([row], [Result(tokens)])} if k else {}),
        )[0]
        assert got.token_ids == tokens[: at + 1]
        assert (got.finish_reason, got.stop) == ("stop", "<eos>" if kind == "eos" else end)
        assert stats(got).emitted == at + 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("k", range(5))
def test_max_tokens_is_exact(tiny: Path, k: int, asynchronous: bool) -> None:
    """U26: 1 to 12 tokens, and every count says so."""
    long = Row([9, 8, 7], replace(GREEDY, max_tokens=40))
    ref = reference(tiny, [long])[0]
    rows = [Row(long.prompt, replace(GREEDY, max_tokens=n), seed=n) for n in range(1, 13)]
    options = {"drafter": oracle(rows, [ref] * 12)} if k else {}
    got = run_rows(tiny, rows, k=k, async_scheduling=asynchronous, **options)
    for n, result in enumerate(got, 1):
        assert result.token_ids == ref.token_ids[:n] and result.finish_reason == "length"
        s = stats(result)
        assert s.emitted == n >= s.accepted
        assert asynchronous or s.drafted == s.accepted == n - s.steps, "no draft past the end"


def test_a_draft_of_eos_does_not_end_a_row(tiny: Path, distinct: tuple[Row, list[int]]) -> None:
    """U28: only the target ends a row."""
    row, tokens = distinct
    eos = next(t for t in range(VOCAB) if t not in tokens)
    got = run_rows(tiny, [row], k=3, eos=[eos], drafter=scripted(lambda *_: [eos] * 3))[0]
    assert (got.token_ids, got.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_targets_eos_at_a_draft_position_ends_the_row(
    tiny: Path, distinct: tuple[Row, list[int]], position: int
) -> None:
    """U28: whether it was proposed there (accepted) or something else was (recovered)."""
    row, tokens = distinct
    for drafts in (tokens[1:4], [*tokens[1 : 1 + position], other(tokens[1 + position]), 0]):
        got = run_rows(tiny, [row], k=3, eos=[tokens[1 + position]], drafter=scripted(lambda *_, d=drafts: d))[0]
        assert (got.token_ids, got.stop) == (tokens[: 2 + position], "<eos>")
        assert stats(got).steps == 2


@pytest.fixture(scope="module", params=[1, 2], ids=["1 layer", "2 layers"])
def to_the_limit(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Row], list[Result]]:
    """Rows that end at the model's limit of 48 tokens, and their REF."""
    folder = write_checkpoint(tmp_path_factory.mktemp("limit"), num_nextn_predict_layers=request.param)
    rng = random.Random(6)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    rows = [Row([rng.randrange(VOCAB) for _ in range(n)], params, seed=n) for n in (1, 27, *range(37, 48))]
    ref = reference(folder, rows, max_model_len=48)
    assert all(len(row.prompt) + len(r.token_ids) == 48 for row, r in zip(rows, ref, strict=True))
    return folder, rows, ref


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("block_size", [4, 7])
def test_rows_run_to_the_models_limit_and_the_null_block_is_never_written(
    to_the_limit: tuple[Path, list[Row], list[Result]], block_size: int, asynchronous: bool
) -> None:
    """U30. The whole pool is poisoned first: nothing unwritten may be read either."""
    folder, rows, ref = to_the_limit
    for drafter in (None, oracle(rows, ref)):
        harness = Harness(
            folder, k=4, max_model_len=48, block_size=block_size, drafter=drafter, async_scheduling=asynchronous
        )
        harness.worker.kv_caches.fill_(float("nan"))
        got = harness.run(rows)
        assert ids(got) == ids(ref)
        assert {r.finish_reason for r in got} == {"length"}
        assert bool(harness.worker.kv_caches[:, 0].isnan().all())


def test_every_eos_id_ends_a_row_and_ignore_eos_lifts_all(tiny: Path, distinct: tuple[Row, list[int]]) -> None:
    """U31."""
    row, tokens = distinct
    eos = [tokens[5], tokens[3], tokens[6]]
    unused = next(t for t in range(VOCAB) if t not in tokens)
    for k in (0, 3):
        options = {"drafter": oracle([row], [Result(tokens)])} if k else {}
        assert run_rows(tiny, [row], k=k, eos=eos, **options)[0].token_ids == tokens[:4]
        ignoring = Row(row.prompt, replace(row.params, ignore_eos=True), row.seed)
        got = run_rows(tiny, [ignoring], k=k, eos=eos, **options)[0]
        assert (got.token_ids, got.finish_reason) == (tokens, "length")
        stop_ids = (unused, tokens[6])
        stopping = Row(row.prompt, replace(row.params, ignore_eos=True, stop_token_ids=stop_ids), row.seed)
        got = run_rows(tiny, [stopping], k=k, eos=eos, **options)[0]
        assert (got.token_ids, got.stop) == (tokens[:7], tokens[6])


# U37, U39: seeds, and nothing but seeds


def test_seeds_differ_and_repeat(tiny: Path) -> None:
    """U37."""
    rows = [Row([5, 6], SamplingParams(max_tokens=12), seed=i) for i in range(20)]
    harness = Harness(tiny, k=2)
    first = ids(harness.run(rows))
    assert len({tuple(t) for t in first}) >= 18
    assert ids(harness.run(rows)) == first
    assert ids(harness.run(rows[::-1])) == first[::-1], "not the slot, nor the order"
    high = [Row([5, 6], SamplingParams(max_tokens=12), seed=i << 32) for i in range(20)]
    assert len({tuple(t) for t in ids(harness.run(high))}) >= 18, "all bits of a seed count"


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("seqs", [1, 3, 16])
def test_slots_chunks_and_cache_change_nothing(
    tiny: Path, greedy_30: tuple[list[Row], Any], seqs: int, budget: int
) -> None:
    """U39: greedy, with drafts from the real head; the cache, used and unused, in both modes of scheduling."""
    rows, want = greedy_30
    for caching in (False, True):
        asynchronous = caching == (budget == 8)
        harness = Harness(
            tiny, k=3, max_num_seqs=seqs, budget=budget, prefix_caching=caching, async_scheduling=asynchronous
        )
        assert ids(harness.run(rows)) == want


@pytest.fixture(scope="module")
def greedy_30(tiny: Path) -> tuple[list[Row], list[list[int]]]:
    """30 rows, some with shared prefixes, and their REF."""
    shared = prompts(7, 1, longest=1)[0] * 9
    rows = rows_of([shared[: i % 10] + p for i, p in enumerate(prompts(8, 30))], replace(GREEDY, max_tokens=5))
    return rows, ids(reference(tiny, rows))


# U42, U43, U44, U46: blocks and the prefix cache


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_repeated_prompt_hits_all_but_its_end_and_drafts_as_well(tiny: Path, asynchronous: bool) -> None:
    """U42."""
    prompt = [random.Random(9).randrange(VOCAB) for _ in range(50)]
    row = Row(prompt, SamplingParams(temperature=1.5, max_tokens=30), seed=3)
    harness = Harness(tiny, k=3, async_scheduling=asynchronous)
    first, second = harness.run([row])[0], harness.run([row])[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids
    assert first.stats == second.stats and stats(first).accepted > 0


def test_warm_rows_over_scattered_blocks_equal_cold_ones(tiny: Path) -> None:
    """U43: 20 prompts that share prefixes of 1 to 30 tokens, in a pool whose free list was shuffled."""
    rng = random.Random(10)
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    starts = rng.sample(range(1, 31), 20)
    rows = rows_of([shared[:n] + p for n, p in zip(starts, prompts(11, 20), strict=True)])
    ref = reference(tiny, rows)
    harness = Harness(tiny, k=3, num_blocks=200, max_num_seqs=5)
    free = harness.scheduler.kv.pool._free
    order = list(free)
    rng.shuffle(order)
    free.clear()
    free.update(dict.fromkeys(order))
    cold = harness.run(rows)
    tables = list(harness.scheduler.kv.pool.cached.values())
    assert tables != sorted(tables)
    warm = harness.run(rows)
    assert ids(cold) == ids(warm) == ids(ref)
    assert sum(r.num_cached_tokens for r in cold) > 100, "rows found each other's prefixes"
    assert all(w.num_cached_tokens >= len(row.prompt) - 4 for w, row in zip(warm, rows, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["anti", "oracle"])
def test_only_committed_tokens_are_cached(tiny: Path, kind: str, asynchronous: bool) -> None:
    """U44: ten steps of rejected drafts over blocks of 4, then a row that continues the text."""
    rows = rows_of(prompts(12, 3))
    ref = reference(tiny, rows)
    harness = Harness(
        tiny, k=4, drafter=oracle(rows, ref, other if kind == "anti" else int), async_scheduling=asynchronous
    )
    assert ids(harness.run(rows)) == ids(ref)
    committed = {b"": 0}
    for row, result in zip(rows, ref, strict=True):
        text, parent = row.prompt + result.token_ids, b""
        for start in range(0, len(text) - 4, 4):
            parent = hash_block(parent, text, start, 4)
            committed[parent] = start
    assert set(harness.scheduler.kv.pool.cached) <= set(committed)
    assert len(harness.scheduler.kv.pool.cached) > 10
    longer = [
        Row([*row.prompt, *r.token_ids, 5], replace(GREEDY, max_tokens=12), seed=900 + i)
        for i, (row, r) in enumerate(zip(rows, ref, strict=True))
    ]
    got = harness.run(longer)
    assert all(r.num_cached_tokens > len(row.prompt) for r, row in zip(got, rows, strict=True))
    assert ids(got) == ids(reference(tiny, longer))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_fill_of_the_last_block(tiny: Path, asynchronous: bool) -> None:
    """U46: lengths of 0 to 3 more than whole blocks, in a pool that is enough and in ones where lookahead shrinks."""
    rows = rows_of([[i] * n for i, n in enumerate(range(4, 12))], replace(GREEDY, max_tokens=13))
    ref = reference(tiny, rows)
    for num_blocks, drafters in ((200, [None]), (9, [None, oracle(rows, ref)]), (13, [oracle(rows, ref)])):
        for drafter in drafters:
            harness = Harness(tiny, k=4, num_blocks=num_blocks, drafter=drafter, async_scheduling=asynchronous)
            harness.worker.kv_caches.fill_(float("nan"))
            assert ids(harness.run(rows)) == ids(ref)
            assert bool(harness.worker.kv_caches[:, 0].isnan().all()), "a draft without a slot was written"


@pytest.mark.parametrize("k", [0, 4])
def test_a_pool_too_small_for_a_row_is_an_error_in_no_time(tiny: Path, k: int) -> None:
    """U46: one block short; the rows beside it are as alone."""
    rows = rows_of([[1] * 20, [2] * 3, [3] * 14], replace(GREEDY, max_tokens=4))
    start = time.monotonic()
    got = run_rows(tiny, rows, k=k, num_blocks=1 + 4)
    assert time.monotonic() - start < 5
    assert [r.finish_reason for r in got] == ["error", "length", "error"]
    assert got[0].token_ids == [] and got[0].error is not None
    ref = reference(tiny, rows)
    assert got[1].token_ids == ref[1].token_ids
    assert got[2].token_ids == ref[2].token_ids[:3] and got[2].error is not None


# law 6


SOME_EOS = [3, 11, 20, 41]


@pytest.fixture(scope="module")
def free_and_ended(tiny: Path) -> tuple[list[Row], list[Result], list[Result]]:
    """Rows, their REF without any EOS, and with."""
    rng = random.Random(13)
    rows = [
        Row(p, SamplingParams(temperature=rng.choice([0.0, 0.8]), max_tokens=rng.randint(1, 18)), seed=i)
        for i, p in enumerate(prompts(14, 20), 1)
    ]
    return rows, reference(tiny, rows), reference(tiny, rows, eos=SOME_EOS)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafter", ["mtp", "oracle", "anti", "three right"])
def test_counts_add_up(
    tiny: Path, free_and_ended: tuple[list[Row], list[Result], list[Result]], drafter: str, asynchronous: bool
) -> None:
    """Each step gives its accepted drafts and one token more, but for a last step that ends at an accepted draft."""
    rows, free, ref = free_and_ended
    factory = {
        "mtp": None,
        "oracle": oracle(rows, free),
        "anti": oracle(rows, free, other),
        "three right": accepting(rows, free, lambda *_: 3),
    }[drafter]
    got = run_rows(tiny, rows, k=5, eos=SOME_EOS, drafter=factory, async_scheduling=asynchronous)
    assert ids(got) == ids(ref)
    total = SpecStats()
    cut = 0
    for result in got:
        s = stats(result)
        total.add(s)
        assert s.emitted == len(result.token_ids)
        assert s.drafted == sum(s.drafted_per_pos) and s.accepted == sum(s.accepted_per_pos)
        assert s.drafted_per_pos == sorted(s.drafted_per_pos, reverse=True)
        assert s.accepted_per_pos == sorted(s.accepted_per_pos, reverse=True)
        assert all(a <= d <= s.steps - 1 for a, d in zip(s.accepted_per_pos, s.drafted_per_pos, strict=True))
        missing = s.accepted + s.steps - s.emitted
        assert missing in (0, 1)
        assert missing == 0 or result.finish_reason == "stop" or asynchronous
        cut += missing
    assert total.emitted == sum(len(r.token_ids) for r in ref) == total.accepted + total.steps - cut
    if drafter in ("oracle", "three right"):
        assert cut > 2, "rows end in the middle of a run"
    if drafter == "anti":
        assert total.accepted == 0 and total.drafted > 0 and cut == 0
    if drafter == "oracle" and not asynchronous:
        whole = sum(len(r.token_ids) for r, f in zip(ref, free, strict=True) if r.token_ids == f.token_ids)
        assert whole and total.accepted_per_pos[0] == total.drafted_per_pos[0]
    if drafter == "three right":
        assert total.accepted_per_pos[3:] == [0, 0] and total.drafted_per_pos[4] > 0
