"""The scheduler without a device: results are fed by hand, or by a fake device that knows what every KV entry holds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fake_device import FakeDevice, next_token

from specgen.engine.core import Abort, Add, EngineCore, Stop
from specgen.engine.executor import UniProcExecutor
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.request import EngineOutput, EngineRequest, Request, Status
from specgen.engine.scheduler import Scheduler, SchedulerConfig
from specgen.engine.step import ModelRunnerOutput, SchedulerOutput
from specgen.sampling_params import SamplingParams

BLOCK = 4
K = 3
EOS = 30
TOKEN = 40


def scheduler(num_blocks: int = 100, caching: bool = False, **changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "num_speculative_tokens": K,
        "num_draft_layers": 1,
        "async_scheduling": False,
        "eos_token_ids": frozenset({EOS}),
    }
    config = SchedulerConfig(**(values | changes))
    return Scheduler(config, KVBlockManager(num_blocks, BLOCK, config.max_model_len, caching))


def new(request_id: int, num_prompt: int, max_tokens: int | None = 12, **params: Any) -> EngineRequest:
    prompt = [100 * request_id + i + 1000 for i in range(num_prompt)]
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=request_id)


def add(s: Scheduler, *requests: EngineRequest) -> list[Request]:
    for request in requests:
        assert s.add_request(request) is None
    return [s.requests[r.request_id] for r in requests]


def shape(out: SchedulerOutput) -> list[tuple[int, int, int, bool]]:
    """(id, tokens, drafts, samples) of each row."""
    return [(r.request_id, r.num_tokens, r.num_draft_tokens, r.samples) for r in out.rows]


def feed(s: Scheduler, out: SchedulerOutput, sampled: Mapping[int, list[int]] | None = None) -> list[EngineOutput]:
    """The step's results: `sampled` by id, one `TOKEN` for any other row that samples; cut as by a device."""
    tokens = [(sampled or {}).get(r.request_id, [TOKEN]) if r.samples else [] for r in out.rows]
    num_accepted = []
    for b, row in enumerate(out.rows):
        whole, tokens[b] = tokens[b], cut_at_end(s, row.request_id, tokens[b])
        num_accepted.append(min(len(tokens[b]), max(0, len(whole) - 1)))
    outputs = s.update_from_output(out, ModelRunnerOutput(tokens, [len(ids) for ids in tokens], num_accepted))
    s.check()
    return outputs


def cut_at_end(s: Scheduler, request_id: int, tokens: list[int]) -> list[int]:
    request = s.requests.get(request_id)
    if request is None:
        return []
    ends = request.end_ids
    num_left = request.max_tokens - request.num_output_tokens
    first = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(first, num_left)]


def schedule(s: Scheduler) -> SchedulerOutput:
    out = s.schedule()
    s.check()
    return out


def step(s: Scheduler, sampled: Mapping[int, list[int]] | None = None, drafts: bool = True) -> SchedulerOutput:
    """One synchronous step; every row gets the drafts 1, 2, 3 after it."""
    out = schedule(s)
    feed(s, out, sampled)
    if drafts:
        s.update_draft_token_ids(out, [[1, 2, 3]] * len(out.rows))
    return out


def assert_counts_agree(*requests: Request) -> None:
    """Every token but the last sampled one is computed, or promised to be by the steps in flight."""
    for r in requests:
        assert r.num_computed_tokens == r.num_tokens - 1 + r.num_output_placeholders


# budget, chunks, order


def test_prompts_are_cut_into_the_budget_and_running_rows_come_first() -> None:
    s = scheduler(max_num_batched_tokens=8, num_speculative_tokens=0)
    add(s, new(0, 10), new(1, 7))
    assert shape(step(s)) == [(0, 8, 0, False)]
    assert shape(step(s)) == [(0, 2, 0, True), (1, 6, 0, False)]
    assert shape(step(s)) == [(0, 1, 0, True), (1, 1, 0, True)]
    assert shape(step(s)) == [(0, 1, 0, True), (1, 1, 0, True)]


def test_drafts_count_against_the_budget_and_are_cut_by_it() -> None:
    s = scheduler(max_num_batched_tokens=8)
    add(s, new(0, 3), new(1, 3), new(2, 2))
    assert shape(step(s)) == [(0, 3, 0, True), (1, 3, 0, True), (2, 2, 0, True)]
    assert shape(step(s)) == [(0, 4, 3, True), (1, 4, 3, True)]
    s = scheduler(max_num_batched_tokens=6)
    first, second = add(s, new(0, 3), new(1, 3))
    step(s)
    assert shape(step(s)) == [(0, 4, 3, True), (1, 2, 1, True)]
    assert_counts_agree(first, second)


def test_a_step_never_exceeds_its_budget() -> None:
    for budget in range(1, 12):
        s = scheduler(max_num_batched_tokens=budget)
        add(s, *(new(i, 5) for i in range(6)))
        while s.has_requests():
            assert 0 < step(s).num_tokens <= budget


def test_first_come_first_served() -> None:
    s = scheduler(max_num_seqs=2)
    add(s, new(5, 3, max_tokens=2), new(1, 3, max_tokens=1), new(3, 3), new(2, 3))
    assert [r[0] for r in shape(step(s))] == [5, 1]
    assert [r[0] for r in shape(step(s))] == [5, 3]
    assert [r[0] for r in shape(step(s))] == [3, 2]


def test_a_row_that_does_not_fit_now_is_not_overtaken() -> None:
    s = scheduler(num_blocks=1 + 8)
    add(s, new(0, 20), new(1, 20), new(2, 2))
    assert [r[0] for r in shape(step(s))] == [0]


def test_the_last_prompt_chunk_alone_samples() -> None:
    s = scheduler(max_num_batched_tokens=4)
    (r,) = add(s, new(0, 9))
    outputs = [feed(s, schedule(s)) for _ in range(3)]
    assert outputs[:2] == [[], []] and outputs[2][0].new_token_ids == [TOKEN]
    assert r.stats.steps == 1, "a step that gives no token is not counted"


# drafts


def test_a_rejection_is_corrected() -> None:
    s = scheduler()
    (r,) = add(s, new(0, 5))
    step(s)
    assert (r.num_computed_tokens, r.num_tokens, r.spec_token_ids) == (5, 6, [1, 2, 3])
    out = schedule(s)
    assert shape(out) == [(0, 4, 3, True)] and r.num_computed_tokens == 9
    feed(s, out, {0: [1, TOKEN]})
    assert (r.num_computed_tokens, r.num_tokens, r.num_output_placeholders) == (7, 8, 0)
    assert (r.stats.drafted, r.stats.accepted, r.stats.drafted_per_pos) == (3, 1, [1, 1, 1])
    feed(s, schedule(s), {0: [TOKEN]})
    assert_counts_agree(r)


def test_optimistic_counts_are_corrected_when_results_arrive() -> None:
    s = scheduler(async_scheduling=True)
    (r,) = add(s, new(0, 5, max_tokens=20))
    first = schedule(s)
    second = schedule(s)
    assert (shape(first), shape(second)) == ([(0, 5, 0, True)], [(0, 4, 3, True)])
    assert (r.num_computed_tokens, r.num_output_placeholders) == (9, 5)
    feed(s, first)
    assert (r.num_computed_tokens, r.num_output_placeholders, r.num_tokens) == (9, 4, 6)
    third = schedule(s)
    assert shape(third) == [(0, 4, 3, True)] and r.num_computed_tokens == 13
    feed(s, second, {0: [1, TOKEN]})
    assert (r.num_computed_tokens, r.num_output_placeholders, r.num_tokens) == (11, 4, 8)
    assert_counts_agree(r)
    feed(s, third, {0: [TOKEN]})
    assert (r.num_computed_tokens, r.num_output_placeholders, r.num_tokens) == (8, 0, 9)
    assert_counts_agree(r)


def test_drafts_end_at_max_tokens() -> None:
    for max_tokens, want in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (9, 3)):
        s = scheduler()
        add(s, new(0, 5, max_tokens=max_tokens))
        assert step(s).num_spec_tokens == want, max_tokens
        if want:
            assert shape(step(s)) == [(0, 1 + want, want, True)]


def test_drafts_end_at_the_models_limit() -> None:
    for num_prompt, want in ((15, 0), (14, 0), (13, 1), (12, 2), (11, 3), (4, 3)):
        s = scheduler(max_model_len=16)
        (r,) = add(s, new(0, num_prompt, max_tokens=None))
        assert step(s).num_spec_tokens == want
        while r.request_id in s.requests:
            out = schedule(s)
            assert r.num_computed_tokens <= 15, "the last token is never an input"
            feed(s, out, {0: [1, 2, 3, 4][: shape(out)[0][2] + 1]})
            s.update_draft_token_ids(out, [[1, 2, 3]])
        assert r.num_tokens == 16 and r.finish_reason == "length"


def test_optimistic_counts_stay_below_the_models_limit() -> None:
    """Two steps in flight whose drafts may all be right; in fact all are, or none."""
    for accepted in (0, 3):
        s = scheduler(max_model_len=16, async_scheduling=True)
        (r,) = add(s, new(0, 5, max_tokens=None))
        in_flight = [schedule(s)]
        while r.request_id in s.requests:
            if s.has_schedulable():
                in_flight.append(schedule(s))
            assert r.num_computed_tokens <= 15
            out = in_flight.pop(0)
            if out.rows:
                feed(s, out, {0: [TOKEN] * (1 + min(accepted, out.rows[0].num_draft_tokens))})
        assert r.num_tokens == 16 and r.finish_reason == "length"


def test_no_drafts_are_asked_for_when_none_can_be_used() -> None:
    assert step(scheduler_with(new(0, 9), max_num_batched_tokens=8)).num_spec_tokens == 0, "an unfinished prompt"
    assert step(scheduler_with(new(0, 4, max_tokens=2))).num_spec_tokens == 0
    assert step(scheduler_with(new(0, 4), num_speculative_tokens=0)).num_spec_tokens == 0
    assert step(scheduler_with(new(0, 4, max_tokens=2), new(1, 4))).num_spec_tokens == K, "one row can use them"


def scheduler_with(*requests: EngineRequest, **changes: Any) -> Scheduler:
    s = scheduler(**changes)
    add(s, *requests)
    return s


def test_drafts_behind_a_placeholder_are_not_scheduled() -> None:
    s = scheduler()
    add(s, new(0, 4), new(1, 4), new(2, 4))
    out = step(s, drafts=False)
    s.update_draft_token_ids(out, [[1, 2, 3], [-1, -1, -1], [1, -1, 3]])
    assert shape(schedule(s)) == [(0, 4, 3, True), (1, 1, 0, True), (2, 2, 1, True)]


# blocks run out


def test_lookahead_then_drafts_shrink_before_anybody_is_preempted() -> None:
    """U46. Four blocks for two rows of 5 tokens and 3 lookahead slots: the drafts' ninth slot is not there."""
    for asynchronous in (False, True):
        s = scheduler(num_blocks=1 + 4, async_scheduling=asynchronous)
        add(s, new(0, 5, max_tokens=10), new(1, 5, max_tokens=10))
        out = step(s, drafts=not asynchronous)
        assert shape(out) == [(0, 5, 0, True), (1, 5, 0, True)] and out.num_spec_tokens == 3
        out = step(s, drafts=not asynchronous)
        assert shape(out) == [(0, 1, 0, True), (1, 1, 0, True)], "no drafts, both rows"
        assert out.num_spec_tokens == 0, "no slots for the next ones either"
        assert s.num_preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    s = scheduler(num_blocks=1 + 4, num_speculative_tokens=0, max_num_seqs=2)
    first, second = add(s, new(0, 7, max_tokens=10), new(1, 7, max_tokens=4))
    add(s, new(2, 1))
    assert [r[0] for r in shape(step(s))] == [0, 1]
    assert [r[0] for r in shape(step(s))] == [0, 1]
    out = step(s)
    assert shape(out) == [(0, 1, 0, True)] and s.num_preemptions == 1
    assert (second.status, second.num_computed_tokens, second.num_tokens) == (Status.WAITING, 0, 9)
    assert [r.request_id for r in s.waiting] == [1, 2], "it keeps its turn, and nobody overtakes it"
    while first.request_id in s.requests:
        assert [r[0] for r in shape(step(s))] == [0]
    out = step(s)
    assert shape(out) == [(1, 9, 0, True), (2, 1, 0, True)]
    assert out.new_rows[0].token_ids == second.token_ids[:9] and out.new_rows[0].num_prompt_tokens == 7


def preempted_in_flight() -> tuple[Scheduler, Request, Request, SchedulerOutput, SchedulerOutput]:
    """Row 1 is preempted while a step that samples it is in flight; row 0's next step too."""
    s = scheduler(num_blocks=1 + 4, async_scheduling=True)
    first, second = add(s, new(0, 7, max_tokens=8), new(1, 3, max_tokens=8))
    out1, out2 = schedule(s), schedule(s)
    assert shape(out1) == [(0, 7, 0, True), (1, 3, 0, True)] and shape(out2) == [(0, 4, 3, True), (1, 1, 0, True)]
    feed(s, out1, {1: [31]})
    out3 = schedule(s)
    assert shape(out3) == [(0, 1, 0, True)] and s.num_preemptions == 1
    assert second.status is Status.WAITING and second.num_steps_in_flight == 1
    return s, first, second, out2, out3


def test_a_stale_output_keeps_its_tokens_and_touches_no_count() -> None:
    s, first, second, out2, out3 = preempted_in_flight()
    assert not any(r.request_id == 1 for r in schedule(s).rows), "it owes a token still"
    outputs = feed(s, out2, {0: [1, TOKEN], 1: [32]})
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [(0, [1, TOKEN]), (1, [32])]
    assert second.token_ids[3:] == [31, 32]
    assert (second.num_computed_tokens, second.num_output_placeholders, second.num_steps_in_flight) == (0, 0, 0)
    feed(s, out3)
    assert s.abort(first.request_id) is not None
    out = schedule(s)
    assert shape(out) == [(1, 5, 0, True)]
    assert out.new_rows[0].token_ids == second.token_ids and out.new_rows[0].num_prompt_tokens == 3
    feed(s, out)
    assert_counts_agree(second)


def test_a_preempted_row_waits_for_what_it_is_owed() -> None:
    """Its blocks are there again at once, and its next token is still on the way."""
    s, _, second, out2, _ = preempted_in_flight()
    assert s.abort(0) is not None
    assert schedule(s).rows == [] and s.has_schedulable()
    feed(s, out2, {1: [32]})
    assert shape(schedule(s)) == [(1, 5, 0, True)] and second.token_ids[3:] == [31, 32]


def test_a_stale_output_can_end_its_row() -> None:
    s, _, second, out2, _ = preempted_in_flight()
    outputs = feed(s, out2, {0: [TOKEN], 1: [EOS]})
    assert (outputs[1].finish_reason, outputs[1].new_token_ids) == ("stop", [EOS])
    assert second.is_finished and not s.waiting


# ends


def test_nothing_behind_the_end_is_kept() -> None:
    """U24: the stop check is made after each token, not after the run."""
    for sampled, kept, reason, stop in (
        ([1, EOS, 3, 4], [1, EOS], "stop", "<eos>"),
        ([1, 2, 7, 4], [1, 2, 7], "stop", 7),
        ([EOS], [EOS], "stop", "<eos>"),
        ([1, 2, 4, EOS], [1, 2, 4, EOS], "stop", "<eos>"),
    ):
        s = scheduler()
        (r,) = add(s, new(0, 5, stop_token_ids=(7,)))
        step(s)
        (output,) = feed(s, schedule(s), {0: sampled})
        assert (output.new_token_ids, output.finish_reason, output.stop) == (kept, reason, stop)
        assert output.stats is not None and output.stats.emitted == 1 + len(kept)
        assert r.is_finished and not s.has_requests()


def test_ignore_eos_lifts_eos_and_not_stop_ids() -> None:
    s = scheduler(eos_token_ids=frozenset({3, 9}))
    add(s, new(0, 5, ignore_eos=True, stop_token_ids=(7, 9)))
    step(s)
    (output,) = feed(s, schedule(s), {0: [3, 1, 9, 2]})
    assert (output.new_token_ids, output.finish_reason, output.stop) == ([3, 1, 9], "stop", 9)


def test_async_overshoot_is_cut_at_max_tokens() -> None:
    s = scheduler(async_scheduling=True)
    add(s, new(0, 5, max_tokens=6))
    first, second = schedule(s), schedule(s)
    feed(s, first)
    third = schedule(s)
    assert third.rows
    (output,) = feed(s, second, {0: [1, 2, 3, 4]})
    assert output.finish_reason is None
    assert not s.has_schedulable(), "the step in flight ends the row for certain"
    (output,) = feed(s, third, {0: [1, 2, 3][: third.rows[0].num_draft_tokens + 1]})
    assert output.finish_reason == "length" and output.new_token_ids == [1]


def test_abort_in_every_state() -> None:
    s = scheduler(async_scheduling=True, max_num_seqs=1)
    add(s, new(0, 5), new(1, 5))
    assert s.abort(9) is None
    output = s.abort(1)
    assert output is not None and output.finish_reason == "abort" and output.new_token_ids == []
    first, second = schedule(s), schedule(s)
    feed(s, first)
    output = s.abort(0)
    assert output is not None and output.stats is not None and output.stats.emitted == 1
    s.check()
    assert s.abort(0) is None
    add(s, new(2, 5))
    third = schedule(s)
    assert third.rows[0].slot == second.rows[0].slot, "the slot has a new owner while the old one's step is in flight"
    assert feed(s, second, {0: [TOKEN] * 4}) == []
    (output,) = feed(s, third)
    assert (output.request_id, output.new_token_ids) == (2, [TOKEN])
    assert s.kv.pool.num_free_blocks == 99 - 2


def test_abort_of_a_preempted_row() -> None:
    s, _, second, out2, _ = preempted_in_flight()
    output = s.abort(1)
    assert output is not None and output.finish_reason == "abort" and second.is_finished
    assert [o.request_id for o in feed(s, out2)] == [0]


# rows that cannot run


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (new(0, 0), "no tokens"),
        (new(0, 64), "limit is 64"),
        (new(0, 80), "limit is 64"),
        (new(0, 17, max_tokens=1), "whole pool has 16"),
    ],
)
def test_a_row_that_can_never_fit_is_an_error_at_once(request_: EngineRequest, word: str) -> None:
    """U46, U59, U62."""
    s = scheduler(num_blocks=1 + 4)
    output = s.add_request(request_)
    assert output is not None and output.finish_reason == "error" and output.error is not None and word in output.error
    assert not s.has_requests()


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_row_that_outgrows_the_pool_ends_with_an_error_and_its_tokens(asynchronous: bool, acceptance: float) -> None:
    """U46: 16 slots compute 16 tokens and so sample the 17th; the others go on."""
    for num_prompt in (1, 9, 16):
        params = (
            SamplingParams(max_tokens=17 - num_prompt, ignore_eos=True),
            SamplingParams(max_tokens=18 - num_prompt, ignore_eos=True),
            SamplingParams(max_tokens=None, ignore_eos=True),
        )
        requests = [EngineRequest(i, list(range(i, i + num_prompt)), p, i) for i, p in enumerate(params)]
        requests.append(EngineRequest(3, [1, 2], SamplingParams(max_tokens=5, ignore_eos=True), 3))
        got, _ = run_random(requests, scheduler(num_blocks=1 + 4, async_scheduling=asynchronous), acceptance)
        assert [got[i][1] for i in range(4)] == ["length", "error", "error", "length"]
        for r in requests:
            tokens = got[r.request_id][0]
            assert tokens == plain(r)[0][: len(tokens)] and len(tokens) == (5 if r.request_id == 3 else 17 - num_prompt)


# under a random load


def plain(request: EngineRequest, max_model_len: int = 64) -> tuple[list[int], str]:
    """What the row gives, one token at a time."""
    ids, num_prompt = list(request.prompt_token_ids), len(request.prompt_token_ids)
    limit = min(request.params.max_tokens or max_model_len, max_model_len - num_prompt)
    while True:
        ids.append(next_token(ids))
        if (ids[-1] == EOS and not request.params.ignore_eos) or ids[-1] in request.params.stop_token_ids:
            return ids[num_prompt:], "stop"
        if len(ids) - num_prompt >= limit:
            return ids[num_prompt:], "length"


def run_random(
    requests: list[EngineRequest], s: Scheduler, acceptance: float, seed: int = 0, abort_chance: float = 0.0
) -> tuple[dict[int, tuple[list[int], str | None]], FakeDevice]:
    """All requests through the loop over a fake device, some added and some aborted between its steps."""
    rng = random.Random(seed)
    got: dict[int, tuple[list[int], str | None]] = {r.request_id: ([], None) for r in requests}
    device = FakeDevice(s.kv, s.config.num_speculative_tokens, acceptance, seed)

    def on_outputs(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            tokens, reason = got[output.request_id]
            assert reason is None, "an output after the last one"
            got[output.request_id] = ([*tokens, *output.new_token_ids], output.finish_reason)
            if output.finish_reason in ("stop", "length"):
                assert output.stats is not None and output.stats.emitted == len(got[output.request_id][0])

    core = EngineCore(s, UniProcExecutor(device), on_outputs, check_every_step=True)
    left = list(reversed(requests))

    def add_some(num: int) -> None:
        for _ in range(min(num, len(left))):
            core.input_queue.put(Add(left.pop()))

    def before_step() -> None:
        device.check_cache()
        if left:
            add_some(rng.choice([0, 0, 1, 3]))
        if rng.random() < abort_chance and s.requests:
            core.input_queue.put(Abort((rng.choice(list(s.requests)),)))

    device.before_step = before_step
    while left:
        add_some(2)
        core.input_queue.put(Stop(drain=True))
        core.run_busy_loop()
    device.check_cache()
    assert s.kv.pool.num_free_blocks == s.kv.pool.num_blocks - 1
    return got, device


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(40))
def test_any_load_gives_every_row_its_own_tokens(seed: int, asynchronous: bool) -> None:
    """Budget, pool, slots, K, acceptance, cache and draft layers at random; the conservation laws after each step."""
    rng = random.Random(seed)
    shared = [rng.randrange(50) for _ in range(16)]
    requests = [
        EngineRequest(
            i,
            shared[: rng.choice([0, 5, 8, 16])] + [rng.randrange(50) for _ in range(rng.randint(1, 12))],
            SamplingParams(
                max_tokens=rng.choice([1, 2, 5, 20, None]),
                ignore_eos=rng.random() < 0.3,
                stop_token_ids=rng.choice([(), (7,)]),
            ),
            seed=i,
        )
        for i in range(30)
    ]
    layers = rng.choice([1, 1, 2, 3])
    s = scheduler(
        num_blocks=rng.choice([8, 13, 16, 25, 200]),
        caching=rng.random() < 0.7,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 5, 9, 64]),
        num_speculative_tokens=rng.choice([0, 1, 3, 5]),
        num_draft_layers=layers,
        max_model_len=rng.choice([32, 64]),
        async_scheduling=asynchronous,
    )
    got, _ = run_random(requests, s, rng.choice([0.0, 0.5, 0.9, 1.0]), seed, abort_chance=rng.choice([0.0, 0.1]))
    for request in requests:
        tokens, reason = got[request.request_id]
        want, want_reason = plain(request, s.config.max_model_len)
        if reason == "abort":
            assert tokens == want[: len(tokens)]
        elif reason == "error":
            num_slots = s.kv.max_request_tokens()
            assert tokens == want[: len(tokens)] and (
                len(request.prompt_token_ids) > num_slots or len(request.prompt_token_ids + tokens) == num_slots + 1
            )
        else:
            assert (tokens, reason) == (want, want_reason)


def test_the_random_loads_preempt_and_hit() -> None:
    """The test above covers what it is meant to cover."""
    requests = [EngineRequest(i, [1, 2, 3, 4, 5, 6, 7, 8, 10 + i], SamplingParams(max_tokens=15), i) for i in range(12)]
    s = scheduler(num_blocks=13, caching=True, async_scheduling=True)
    _, device = run_random(requests, s, acceptance=0.8)
    assert s.num_preemptions > 0
    assert any(new.kv_start == 8 for out in device.steps for new in out.new_rows)
    assert any(row.num_draft_tokens == K for out in device.steps for row in out.rows)


def test_given_tokens_count_as_computed_and_take_their_blocks() -> None:
    """Row 0: 10 of 11 prompt tokens are given, so that its first step decodes. Row 1: all of 6, of which one stays."""
    s = scheduler()
    given = [replace(new(0, 11), num_given_tokens=10), replace(new(1, 6), num_given_tokens=6), new(2, 5)]
    add(s, *given)
    out = s.schedule()
    assert shape(out) == [(0, 1, 0, True), (1, 1, 0, True), (2, 5, 0, True)]
    assert [row.is_decode for row in out.rows] == [True, True, False]
    assert [(row.num_computed_tokens, row.kv_start) for row in out.new_rows] == [(10, 0), (5, 0), (0, 0)]
    assert [len(row.new_blocks) for row in out.rows] == [4, 3, 2], "for prompt, token and lookahead"
    outputs = feed(s, out)
    assert [output.request_id for output in outputs] == [0, 1, 2]
    assert all(output.num_cached_tokens == 0 for output in outputs)
