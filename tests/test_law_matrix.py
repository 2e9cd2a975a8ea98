"""Law 1 over a generated matrix: 2,000 rows under every parameter there is, each bitwise as it is alone without drafts.

Each group draws its rows, its drafter and its engine: draft length, in some another one after every step, chunk size,
company, a pool that forces preemption, prefix cache on or off, synchronous or not. Compared are ids, how the row ended,
its log-probabilities and the prompt's.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Repeating, Restless, Result, Row, oracle, scripted
from letters import check_of, letters
from tiny import write_checkpoint

from specgen.sampling_params import SamplingParams
from specgen.stats import SpecStats

VOCAB = 48
EOS = [3, 17]
NUM_GROUPS, GROUP = 50, 40
MAX_LEN = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as a model with every kind of layer can be."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "q_lora_rank": None}
    return write_checkpoint(tmp_path_factory.mktemp("matrix"), vocab_size=VOCAB, num_hidden_layers=2, **sizes)


@pytest.fixture(scope="module")
def alone(model: Path) -> Harness:
    """REF: one row at a time, no drafts, nothing shared."""
    return Harness(model, max_num_seqs=1, prefix_caching=False, eos=EOS, max_model_len=MAX_LEN)


def random_params(rng: random.Random) -> SamplingParams:
    """Each parameter on with odds of one in four or so; whatever is refused as contradictory is drawn anew."""

    def maybe(off: Any, on: Any, odds: float = 0.25) -> Any:
        return on if rng.random() < odds else off

    def ids(low: int, high: int) -> list[int]:
        return rng.sample(range(VOCAB), rng.randint(low, high))

    max_tokens = rng.randint(1, 11)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.4, 0.9, 1.6]),
        top_k=maybe(0, rng.randint(1, 12)),
        top_p=maybe(1.0, rng.uniform(0.3, 0.99)),
        min_p=maybe(0.0, rng.uniform(0.01, 0.4)),
        typical_p=maybe(1.0, rng.uniform(0.2, 0.95)),
        logit_bias=maybe((), tuple((t, rng.uniform(-8, 4)) for t in sorted(ids(1, 12)))),
        allowed_token_ids=maybe(None, tuple(ids(20, 40))),
        bad_words_ids=maybe((), tuple(tuple(rng.choices(range(VOCAB), k=rng.randint(1, 3))) for _ in range(60))),
        no_repeat_ngram_size=maybe(0, rng.randint(1, 3)),
        repetition_penalty=maybe(1.0, rng.uniform(0.7, 1.6)),
        frequency_penalty=maybe(0.0, rng.uniform(-1, 1)),
        presence_penalty=maybe(0.0, rng.uniform(-1, 1)),
        min_tokens=maybe(0, rng.randint(0, max_tokens)),
        max_tokens=max_tokens,
        ignore_eos=maybe(False, True),
        stop_token_ids=maybe((), tuple(ids(1, 3))),
        stop=maybe((), tuple("".join(letters(t) for t in ids(1, 1)) for _ in range(2))),
        logprobs=maybe(None, rng.randint(0, 4), 0.3),
        logprobs_mode=rng.choice(["raw", "processed"]),
        prompt_logprobs=maybe(None, rng.randint(0, 2), 0.15),
    )


def make_rows(rng: random.Random) -> list[Row]:
    """Ragged prompts, many with a beginning in common."""
    shared = [rng.randrange(VOCAB) for _ in range(14)]
    rows = []
    for i in range(GROUP):
        prompt = shared[: rng.choice([0, 0, 5, 9, 14])] + rng.choices(range(VOCAB), k=rng.randint(1, 7))
        params = random_params(rng)
        rows.append(Row(prompt, params, seed=rng.randrange(1 << 62) + i, new_stop_check=check_of(params)))
    return rows


def drafter_of(rng: random.Random, rows: list[Row], ref: list[Result]) -> Any:
    """The model's own, or scripted: right, never right, right for a while, or anything."""
    kind = rng.choice(["mtp", "mtp", "mtp", "oracle", "anti", "half", "random"])
    if kind == "mtp":
        return None
    if kind == "random":
        noise = random.Random(rng.random())
        return scripted(lambda *_: [noise.randrange(-1, VOCAB) for _ in range(noise.randrange(6))])
    change = {
        "oracle": lambda t: t,
        "anti": lambda t: (t + 1) % VOCAB,
        "half": lambda t: t if t % 2 else (t + 1) % VOCAB,
    }[kind]
    return oracle(rows, ref, change)


def outcome(result: Result) -> tuple[Any, ...]:
    return (
        result.token_ids,
        (result.finish_reason, result.stop, result.stop_at, result.error),
        result.logprobs,
        result.prompt_logprobs,
    )


TOTAL: Counter[str] = Counter()


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_rows_are_as_alone(model: Path, alone: Harness, group: int) -> None:
    rng = random.Random(f"matrix {group}")
    rows = make_rows(rng)
    ref = [alone.run([row])[0] for row in rows]
    k = group % 6
    options: dict[str, Any] = {
        "budget": rng.choice([3, 9, 40, 512]),
        "max_num_seqs": rng.choice([2, 7, 40]),
        "num_blocks": rng.choice([12, 20, 400]),
        "block_size": rng.choice([3, 4, 8]),
        "prefix_caching": rng.random() < 0.5,
        "async_scheduling": rng.random() < 0.5,
    }
    drafter = drafter_of(rng, rows, ref) if k else None
    restless = Restless(k, rng) if group % 4 == 1 else None
    if options["async_scheduling"] and group % 3:
        options["repeat_limit"] = Repeating(5, rng)
    harness = Harness(model, k=k, eos=EOS, max_model_len=MAX_LEN, drafter=drafter, draft_length=restless, **options)
    steps = harness.seen_steps()
    got = harness.run(rows)
    for i, (a, b) in enumerate(zip(got, ref, strict=True)):
        assert outcome(a) == outcome(b), (i, rows[i].params)
    stats = SpecStats()
    for result in got:
        assert result.stats is not None and result.stats.emitted == len(result.token_ids)
        stats.add(result.stats)
    TOTAL.update(
        rows=len(rows),
        accepted=stats.accepted,
        rejected=stats.drafted - stats.accepted,
        preempted=harness.scheduler.num_preemptions,
        repeated=sum(step.times - 1 for step in steps),
        cached=sum(r.num_cached_tokens > 0 for r in got),
    )
    for param in fields(SamplingParams):
        TOTAL[f"{param.name} on"] += sum(getattr(row.params, param.name) != param.default for row in rows)
    TOTAL.update(f"end {type(result.stop).__name__} {result.finish_reason}" for result in got)


def test_everything_happened_many_times() -> None:
    """Runs behind the groups: the matrix is not empty of what it is for."""
    if TOTAL["rows"] < NUM_GROUPS * GROUP:
        pytest.skip("needs all groups, in this process")
    assert TOTAL["rows"] >= 2000
    assert min(TOTAL[name] for name in ("accepted", "rejected", "preempted", "cached", "repeated")) > 100, TOTAL
    unset = {"n", "seed", "include_stop"}  # of the job, not of the engine
    assert all(TOTAL[f"{p.name} on"] > 200 for p in fields(SamplingParams) if p.name not in unset), TOTAL
    ends = {name: count for name, count in TOTAL.items() if name.startswith("end ")}
    assert len(ends) >= 3 and min(ends.values()) > 20, ends
