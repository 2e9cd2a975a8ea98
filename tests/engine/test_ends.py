"""How rows end when several ends are near: the earliest in token order wins, and everything is cut at the same token.

A row's text is scripted, a letter or two a token; drafts are the text itself, so that ends lie inside a run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Result, Row, oracle, reference, run_rows
from letters import check_of, letters

from specgen.sampling_params import SamplingParams

VOCAB = 64
FREE = SamplingParams(temperature=0.7, max_tokens=24, logprobs=1)


def cut(free: Result, params: SamplingParams, eos: Sequence[int]) -> tuple[int, str, Any, int | None]:
    """How many of the free row's tokens stay, and how it ends, by the rules as they are written down."""
    text = ""
    for n, token in enumerate(free.token_ids, 1):
        if token in eos and not params.ignore_eos:
            return n, "stop", "<eos>", None
        if token in params.stop_token_ids:
            return n, "stop", token, None
        before, text = len(text), text + letters(token)
        ends = [
            (at + len(stop), at, stop)
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if ends and n > params.min_tokens:
            return n, "stop", min(ends)[2], min(ends)[1]
        if n == params.max_tokens:
            return n, "length", None, None
    raise AssertionError("the free row is too short")


@pytest.fixture(scope="module")
def free(tiny: Path) -> tuple[list[Row], list[Result]]:
    rng = random.Random(3)
    rows = [Row([rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))], FREE, seed=i) for i in range(1, 31)]
    return rows, reference(tiny, rows)


def near_ends(rows: list[Row], results: list[Result], seed: int) -> list[Row]:
    """Each row with one to four ends among its tokens 2 to 9, several at the same token now and then."""
    rng = random.Random(seed)
    made = []
    for row, result in zip(rows, results, strict=True):
        at = [rng.randrange(1, 9) for _ in range(4)]
        if rng.random() < 0.5:
            at = [at[0]] * 4
        text = "".join(map(letters, result.token_ids[: at[2] + 1]))
        params = replace(
            row.params,
            stop_token_ids=(result.token_ids[at[1]],) if rng.random() < 0.5 else (),
            stop=(text[-rng.choice([1, 2, 4]) :], "zz") if rng.random() < 0.7 else (),
            max_tokens=at[3] + 1 if rng.random() < 0.6 else 24,
            ignore_eos=rng.random() < 0.3,
        )
        made.append(Row(row.prompt, params, row.seed, check_of(params)))
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_the_earliest_end_wins(tiny: Path, free: tuple[list[Row], list[Result]], k: int, seed: int) -> None:
    """U24, U26, U28, U31: ids, finish reason, log-probabilities and counts are all cut there."""
    rows = near_ends(*free, seed)
    eos = [free[1][0].token_ids[3], free[1][1].token_ids[5]]
    options: dict[str, Any] = {"drafter": oracle(*free)} if k else {}
    got = run_rows(tiny, rows, k=k, eos=eos, async_scheduling=seed % 2 == 1, **options)
    kinds = set()
    for row, result, whole in zip(rows, got, free[1], strict=True):
        count, reason, stop, stop_at = cut(whole, row.params, eos)
        assert result.token_ids == whole.token_ids[:count]
        assert (result.finish_reason, result.stop, result.stop_at) == (reason, stop, stop_at)
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        assert result.logprobs == whole.logprobs[:count]
        assert result.stats is not None
        assert result.stats.emitted == count >= result.stats.accepted
        kinds.add("text" if stop_at is not None else "id" if isinstance(stop, int) else stop or reason)
    assert kinds == {"text", "id", "<eos>", "length"}


def test_a_least_length_holds_for_strings_too(tiny: Path, free: tuple[list[Row], list[Result]]) -> None:
    rows = []
    for row, result in zip(*free, strict=True):
        stops = (letters(result.token_ids[2]), letters(result.token_ids[9]))
        params = replace(row.params, stop=stops, min_tokens=5)
        rows.append(Row(row.prompt, params, row.seed, check_of(params)))
    got = run_rows(tiny, rows, k=3, drafter=oracle(*free))
    for row, result, whole in zip(rows, got, free[1], strict=True):
        count, *_ = cut(whole, row.params, ())
        assert count > 5 and result.token_ids == whole.token_ids[:count]


def test_a_preempted_row_finds_a_string_that_began_before(tiny: Path, free: tuple[list[Row], list[Result]]) -> None:
    rows = []
    for row, result in zip(*free, strict=True):
        params = replace(row.params, stop=("".join(map(letters, result.token_ids[9:16])),))
        rows.append(Row(row.prompt, params, row.seed, check_of(params)))
    harness = Harness(tiny, k=2, num_blocks=18, async_scheduling=True)
    got = harness.run(rows)
    assert harness.scheduler.num_preemptions > 0
    for row, result, whole in zip(rows, got, free[1], strict=True):
        assert result.token_ids == whole.token_ids[: cut(whole, row.params, ())[0]]


def test_stop_strings_without_a_tokenizer_are_refused_by_name(tiny: Path) -> None:
    got = run_rows(tiny, [Row([1], replace(FREE, stop=("a",)))])[0]
    assert got.finish_reason == "error" and "stop strings" in str(got.error)
