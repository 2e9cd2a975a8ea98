"""When a decode step runs several times, and how often."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice, Sampled
from harness import Harness, Row
from tiny import write_checkpoint

from specgen.engine.client import may_repeat
from specgen.engine.core import EngineCore, Stop
from specgen.engine.executor import UniProcExecutor
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.repetition import RepeatLimit
from specgen.engine.request import EngineRequest
from specgen.engine.scheduler import Scheduler, SchedulerConfig
from specgen.engine.step import ModelRunnerOutput, ScheduledRow, SchedulerOutput
from specgen.sampling_params import SamplingParams

EOS = 1


def scheduler(num_blocks: int = 100, k: int = 0, max_num_seqs: int = 4, max_model_len: int = 64) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, 64, max_model_len, k, int(k > 0), True, frozenset([EOS]))
    made = Scheduler(config, KVBlockManager(num_blocks, 4, max_model_len, enable_prefix_caching=True))
    made.repeat_limit = 4
    return made


def add(s: Scheduler, request_id: int, num_prompt: int = 6, **params: object) -> None:
    sampling = SamplingParams(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    assert s.add_request(EngineRequest(request_id, list(range(10, 10 + num_prompt)), sampling, seed=0)) is None


def result(rows: list[list[list[int]]]) -> ModelRunnerOutput:
    """What the step sampled: for each row a list each time; all but the last token of each are drafts."""
    times = list(chain.from_iterable(rows))
    num_sampled = [len(ids) for ids in times]
    return ModelRunnerOutput(
        [list(chain.from_iterable(row)) for row in rows], num_sampled, [max(0, num - 1) for num in num_sampled]
    )


def sampled(out: SchedulerOutput, ids: list[list[int]]) -> ModelRunnerOutput:
    """Every row samples `ids`, one list each time."""
    return result([ids[: out.times]] * len(out.rows))


def prompt_step(s: Scheduler, token: int = 30) -> None:
    """Run the step with the rows' prompts."""
    out = s.schedule()
    assert out.times == 1 and out.new_rows
    s.update_from_output(out, sampled(out, [[token]]))
    s.check()


def test_a_step_runs_as_often_as_it_may_and_its_tokens_come_at_once() -> None:
    s = scheduler()
    add(s, 0)
    add(s, 1)
    prompt_step(s)
    out = s.schedule()
    assert (out.times, [row.num_computed_after for row in out.rows], out.num_tokens) == (4, [7, 7], 2)
    assert [out.num_repeated(row) for row in out.rows] == [3, 3] and out.max_computed_after == 10
    ahead = s.schedule()  # asynchronous: before the first one is read
    assert (ahead.times, ahead.max_computed_after) == (4, 14)
    outputs = s.update_from_output(out, sampled(out, [[31], [32], [33], [34]]))
    s.check()
    assert [output.new_token_ids for output in outputs] == [[31, 32, 33, 34]] * 2
    assert [request.stats.steps for request in s.running] == [5, 5]
    assert [request.num_computed_tokens for request in s.running] == [14, 14]


def test_rejected_drafts_of_every_time_are_taken_back() -> None:
    s = scheduler(k=2)
    add(s, 0)
    prompt_step(s)
    out = s.schedule()
    row = out.rows[0]
    assert (out.times, row.num_tokens, row.num_draft_tokens) == (4, 3, 2)
    assert (out.num_repeated(row), out.max_computed_after) == (9, 18)
    s.update_from_output(out, sampled(out, [[31], [32, 33], [34, 35, 36], [37]]))
    s.check()
    request = s.running[0]
    assert request.token_ids[6:] == [30, 31, 32, 33, 34, 35, 36, 37]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (13, 0)
    assert (request.stats.drafted, request.stats.accepted, request.stats.accepted_per_pos) == (8, 3, [2, 1])
    # the next step feeds the last token and its drafts
    assert s.schedule().rows[0].num_tokens == 3


def test_a_row_that_ends_in_between_ends_there() -> None:
    s = scheduler()
    add(s, 0)
    prompt_step(s)
    out = s.schedule()
    (output,) = s.update_from_output(out, sampled(out, [[31], [EOS], [], []]))
    assert (output.new_token_ids, output.finish_reason) == ([31, EOS], "stop")
    assert output.stats is not None and (output.stats.steps, output.stats.emitted) == (3, 3)
    s.check()


def test_never_more_often_than_the_longest_row_needs_nor_beyond_a_rows_room() -> None:
    s = scheduler(max_model_len=12)
    add(s, 0, max_tokens=3)
    add(s, 1, max_tokens=4)
    prompt_step(s)
    out = s.schedule()
    assert (out.times, out.max_computed_after) == (3, 9)
    outputs = s.update_from_output(out, result([[[31], [32], []], [[31], [32], [33]]]))
    assert [(len(output.new_token_ids), output.finish_reason) for output in outputs] == [(2, "length"), (3, "length")]
    s.check()


@pytest.mark.parametrize(("params", "times"), [({"logprobs": 0}, 1), ({"prompt_logprobs": 1}, 4)])
def test_not_where_the_host_looks_something_up_in_between(params: dict[str, int], times: int) -> None:
    s = scheduler()
    add(s, 0)
    add(s, 1, **params)
    out = s.schedule()
    s.update_from_output(out, sampled(out, [[30]]))
    assert s.schedule().times == times


def test_not_oftener_than_a_row_that_keeps_its_drafts_is_likely_to_need() -> None:
    s = scheduler(k=3)
    add(s, 0, max_tokens=13)
    prompt_step(s)
    out = s.schedule()
    s.update_from_output(out, sampled(out, [[31, 32, 33, 34], [35, 36, 37, 38], [], []]))
    assert s.running[0].num_output_tokens == 9
    assert s.schedule().times == 2  # 9 tokens took 3 steps


def test_what_is_promised_bounds_what_comes_though_less_came_before() -> None:
    """The first repetitions gain a token each, the next ones all drafts, with a third step scheduled in between."""
    s = scheduler(k=3)
    add(s, 0, max_tokens=26)
    prompt_step(s)
    poor, rich = s.schedule(), s.schedule()
    assert (poor.times, rich.times) == (4, 4)
    s.update_from_output(poor, sampled(poor, [[31], [32], [33], [34]]))
    s.check()
    third = s.schedule()
    s.check()
    s.update_from_output(rich, sampled(rich, [[40, 41, 42, 43]] * 4))
    s.check()
    request = s.running[0]
    assert request.num_computed_tokens - len(request.token_ids) + 1 == 4 * third.times
    (output,) = s.update_from_output(third, sampled(third, [[44, 45, 46, 47], [48], [], []]))
    assert (output.finish_reason, request.num_output_tokens) == ("length", 26)


def test_not_beside_parts_of_prompts_nor_for_want_of_blocks() -> None:
    s = scheduler()
    add(s, 0, num_prompt=40)
    add(s, 1, num_prompt=40)
    for num_tokens in ([40, 24], [1, 16]):
        out = s.schedule()
        assert (out.times, [row.num_tokens for row in out.rows]) == (1, num_tokens)
    assert s.schedule().times == 4
    few = scheduler(num_blocks=4)
    add(few, 0)
    prompt_step(few)
    assert few.schedule().times == 4  # up to 10 tokens: the third block is the last
    assert few.schedule().times == 1


def test_a_row_is_admitted_behind_steps_that_run_several_times() -> None:
    s = scheduler()
    add(s, 0)
    prompt_step(s)
    add(s, 1)
    steps = [s.schedule() for _ in range(4)]
    assert [(step.times, len(step.rows), len(step.new_rows)) for step in steps] == [
        (4, 1, 0),
        (1, 2, 1),
        (4, 2, 0),
        (4, 2, 0),
    ]
    s.repeat_limit = 1
    add(s, 2)
    add(s, 3)
    assert [len(s.schedule().new_rows) for _ in range(2)] == [2, 0]


class Watching(RepeatLimit):
    """Notes what it is told, and has limits of its own, one after the other."""

    def __init__(self, *limits: int) -> None:
        super().__init__()
        self.limits = limits
        self.told: list[tuple[SchedulerOutput, ModelRunnerOutput, float | None]] = []
        self.num_restarts: list[int] = []  # by the rounds before it

    def restart(self) -> None:
        self.num_restarts.append(len(self.told))

    def round_done(self, step: SchedulerOutput, output: ModelRunnerOutput, waited: float | None, now: float) -> None:
        self.told.append((step, output, waited))
        self.limit = self.limits[len(self.told) % len(self.limits)]


def test_the_loop_tells_of_every_round_and_keeps_to_the_limit(tmp_path: Path) -> None:
    watching = Watching(1, 2, 3)
    harness = Harness(write_checkpoint(tmp_path), k=1, max_num_seqs=4, async_scheduling=True, repeat_limit=watching)
    rows = [Row([2, 3, 4 + i], SamplingParams(max_tokens=20), seed=i) for i in range(6)]
    for _ in range(2):
        harness.run(rows)
    assert watching.num_restarts[0] == 0 and len(watching.num_restarts) == 2, "once for each time it was idle"
    assert sum(step.times for step, *_ in watching.told) == harness.core.num_steps
    assert {step.times for step, *_ in watching.told} == {1, 2, 3}
    for step, output, waited in watching.told:
        assert len(output.sampled_token_ids) == len(step.rows)
        assert len(output.num_accepted) == len(step.rows) * step.times
        assert waited == 0, "a CPU's step is done when it is launched"
    assert harness.scheduler.repeat_limit == watching.limit


def feed(
    limit: RepeatLimit, waited: Sequence[float | None], num_tokens: int = 100, beside_prompts: bool = False
) -> None:
    """Rounds of a second each, in which the host waits for such parts and so many tokens come."""
    for share in waited:
        rows = [ScheduledRow(0, 0, 9 if beside_prompts else 1, 0, True, [], 0, 0, 9)]
        times = 1 if beside_prompts else limit.limit
        now = (limit._last or 0.0) + 1.0
        output = result([[[7] * num_tokens] * times])
        limit.round_done(SchedulerOutput(rows=rows, times=times), output, share, now)


def begun() -> RepeatLimit:
    """One whose next round is the first that counts."""
    limit = RepeatLimit()
    feed(limit, [0.5])
    return limit


@pytest.mark.parametrize(("num_late", "raised"), [(0, 1), (1, 1), (2, 2), (8, 2), (9, 4), (16, 4)])
def test_it_is_raised_for_two_late_rounds_of_sixteen_and_more_for_most(num_late: int, raised: int) -> None:
    limit = begun()
    feed(limit, [0.01] * num_late + [0.2] * (16 - num_late))
    assert limit.limit == raised


@pytest.mark.parametrize(("num_late", "raised"), [(8, 1), (9, 4)])
def test_rounds_with_prompts_tell_of_a_late_host_if_most_are_late(num_late: int, raised: int) -> None:
    """Where rows end in every step and others take their place there is no other round; few of them are captures."""
    limit = begun()
    feed(limit, [0.01] * num_late + [0.9] * (16 - num_late), beside_prompts=True)
    assert limit.limit == raised


def test_rounds_in_which_no_row_samples_are_nothing_to_compare_with() -> None:
    limit = begun()
    feed(limit, [0.0] * 32, num_tokens=0, beside_prompts=True)
    assert limit.limit == 1


def test_a_trial_beside_prompts_is_not_compared_with_rounds_without() -> None:
    limit = begun()
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4
    feed(limit, [0.0] * 5, num_tokens=10, beside_prompts=True)
    feed(limit, [0.0] * 11, num_tokens=10)
    assert limit.limit == 1
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4, "it neither rests nor tries less"


def test_a_leap_is_tried_again_after_a_trial_that_went_well() -> None:
    limit = begun()
    feed(limit, [0.0] * 16, num_tokens=1000)
    feed(limit, [0.2] * 16, num_tokens=10)
    feed(limit, [0.0] * 16 * 8, num_tokens=1000)
    assert limit.limit == 2
    feed(limit, [0.2] * 16, num_tokens=1000)
    limit.limit = 1
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4


def test_steps_that_could_not_run_so_often_say_nothing_and_end_a_trial_in_time() -> None:
    limit = begun()
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4
    rows = [ScheduledRow(0, 0, 1, 0, True, [], 0, 0, 9)]
    for number in range(64):
        assert limit.limit == 4, number
        assert limit._last is not None
        now = limit._last + 1.0
        limit.round_done(SchedulerOutput(rows=rows, times=1), result([[[7]]]), 0.9, now)
    assert limit.limit == 1
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4


def test_rounds_that_do_not_tell_are_passed_over() -> None:
    limit = begun()
    feed(limit, [None, 0.5] * 32)
    assert limit.limit == 1
    feed(limit, [None, 0.0] * 15)
    assert limit.limit == 1
    feed(limit, [None, 0.0])
    assert limit.limit == 4


def test_the_wait_for_a_step_is_told_unless_the_host_launched_a_long_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its launches fill the device's queue: the host waits there, and not for the results of the step before."""
    monkeypatch.setattr("specgen.engine.step.LONG_STEP", 16)
    waits: list[float] = []

    class Late(Sampled):
        is_read = False

        def wait(self) -> float:
            if not self.is_read:
                waits.append(1.0 + len(waits))
            return 0.0 if self.is_read else waits[-1]

        def get(self) -> ModelRunnerOutput:
            self.is_read = True
            return super().get()

    class Device(FakeDevice):
        def sample_tokens(self) -> Sampled:
            done = super().sample_tokens()
            return Late(done.tokens, done.num_accepted)

    kv = KVBlockManager(100, 4, 64, enable_prefix_caching=False)
    s = Scheduler(SchedulerConfig(3, 64, 64, 0, 0, True, frozenset()), kv)
    device, watching = Device(kv, 0, acceptance=0.0, seed=0), Watching(1)
    core = EngineCore(s, UniProcExecutor(device), lambda outputs: None, repeat_limit=watching)
    for request_id, num_prompt in enumerate((20, 3, 4, 30, 5)):
        add(s, request_id, num_prompt=num_prompt, max_tokens=4 + request_id)
    core.input_queue.put(Stop(drain=True))
    core.run_busy_loop()
    is_long = [step.is_long for step in device.steps]
    many = [ScheduledRow(i, i, 1, 0, True, [], 0, 0, 9) for i in range(17)]
    assert not SchedulerOutput(rows=many).is_long, "a decode step is one launch, whatever its size"
    assert is_long.count(True) == 2 and not is_long[-1]
    told = [waited for _, _, waited in watching.told]
    assert told == [None if behind else wait for wait, behind in zip(waits, [*is_long[1:], False], strict=True)]


def test_rounds_with_prompts_are_no_reason_for_fewer() -> None:
    """The device takes longer for them, and as long however often decode steps run."""
    limit = begun()
    limit.limit = 6
    feed(limit, [0.9] * 160, beside_prompts=True)
    assert limit.limit == 6
    feed(limit, [0.9] * 13, beside_prompts=True)
    feed(limit, [0.66] * 3)
    assert limit.limit == 6, "too few"
    feed(limit, [0.9] * 12, beside_prompts=True)
    feed(limit, [0.66] * 4)
    assert limit.limit == 3


@pytest.mark.parametrize(("gain", "kept"), [(0.99, False), (1.005, False), (1.02, True)])
def test_what_was_raised_stays_so_for_a_hundredth_more_tokens(gain: float, kept: bool) -> None:
    limit = begun()
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 4
    feed(limit, [0.2] * 16, num_tokens=round(1000 * gain / 4))
    assert limit.limit == (4 if kept else 1)
    feed(limit, [0.0] * 16 * 7)
    assert (limit.limit > 1) == kept, "it rests after a trial that failed"
    feed(limit, [0.0] * 16)
    assert kept or limit.limit == 2, "and tries less then"


def test_it_goes_back_to_what_was_before_and_down_to_what_does() -> None:
    limit = begun()
    limit.limit = 6
    feed(limit, [0.0] * 16, num_tokens=1000)
    assert limit.limit == 8
    feed(limit, [0.2] * 16, num_tokens=10)
    assert limit.limit == 6
    feed(limit, [0.45] * 16)
    assert limit.limit == 6
    feed(limit, [0.66] * 16)
    assert limit.limit == 3


class Machine:
    """A device that takes `device` seconds for a step, and a host `once + each * times` for a round of steps.

    Rounds have one step in flight behind the one that is read. Of every `period` rounds one has prompts.
    """

    def __init__(self) -> None:
        self.now = self.device_end = 0.0
        self.limit = RepeatLimit()
        self.flight: list[tuple[SchedulerOutput, float]] = []
        self.chance = random.Random(1)

    def run(
        self,
        num_rounds: int,
        device: float,
        once: float,
        each: float,
        period: int = 0,
        lost: float = 0.0,
        jitter: float = 0.0,
    ) -> float:
        """Run rounds of two rows; the share of the time that the device works. lost: tokens a repetition never has.

        jitter: part of the host's time that comes by chance, now little and now much.
        """
        start, busy = self.now, 0.0
        for number in range(num_rounds):
            is_prompt = period > 0 and number % period == 0
            times = 1 if is_prompt else self.limit.limit
            work = 10 * device if is_prompt else device * times
            rows = [ScheduledRow(i, i, 9 if is_prompt else 1, 0, True, [], 0, 0, 9) for i in range(2)]
            self.now += (once + each * times) * (1 + jitter * (self.chance.expovariate(1) - 1))
            self.device_end = max(self.now, self.device_end) + work
            busy += work
            self.flight.append((SchedulerOutput(rows=rows, times=times), self.device_end))
            if len(self.flight) > 1:
                step, end = self.flight.pop(0)
                asked, self.now = self.now, max(self.now, end)
                ids = [[7] if i >= lost * (step.times - 1) else [] for i in range(step.times)]
                self.limit.round_done(step, result([ids] * 2), self.now - asked, self.now)
        return busy / (self.now - start)


def test_a_slow_device_gets_one_step_at_a_time() -> None:
    machine = Machine()
    assert machine.run(200, device=5e-3, once=1e-3, each=5e-4) > 0.97
    assert machine.limit.limit == 1


@pytest.mark.parametrize(("period", "busy"), [(0, 0.97), (5, 0.94)])
def test_a_device_that_waits_for_the_host_gets_more_at_once_and_no_more_than_it_takes(period: int, busy: float) -> None:
    machine = Machine()
    assert machine.run(12, device=1e-3, once=1.5e-3, each=3e-4) < 0.9  # it is found
    machine.run(100, device=1e-3, once=1.5e-3, each=3e-4, period=period)
    assert machine.run(200, device=1e-3, once=1.5e-3, each=3e-4, period=period) > busy
    settled = machine.limit.limit
    assert 2 <= settled <= 4
    machine.run(200, device=1e-3, once=1.5e-3, each=3e-4, period=period)
    assert machine.limit.limit == settled
    assert machine.run(200, device=1e-3, once=1e-4, each=1e-4) > 0.97  # fewer rows
    assert machine.limit.limit == 1


@pytest.mark.parametrize(("once", "each"), [(1.2e-3, 6e-4), (8e-4, 5e-4), (1.6e-3, 3e-4)])
def test_a_host_that_comes_late_now_and_then_gets_time_for_it(once: float, each: float) -> None:
    machine, plain = Machine(), Machine()
    plain.limit.is_held = True
    machine.run(300, device=1.5e-3, once=once, each=each, jitter=0.3)
    assert machine.run(500, device=1.5e-3, once=once, each=each, jitter=0.3) > 0.985
    assert plain.run(500, device=1.5e-3, once=once, each=each, jitter=0.3) < 0.96


def test_a_host_that_is_always_slower_has_a_limit() -> None:
    machine = Machine()
    machine.run(200, device=1e-4, once=1e-3, each=1e-5)
    assert machine.limit.limit == 8


def test_repetitions_that_bring_nothing_are_given_up() -> None:
    """The host's time goes with the repetitions; or rows end in between, and most repetitions find none."""
    for once, each, lost in ((1e-5, 2e-3, 0.0), (1.5e-3, 3e-4, 0.99)):
        machine = Machine()
        limits = []
        for _ in range(400):
            machine.run(1, device=1e-3, once=once, each=each, lost=lost)
            limits.append(machine.limit.limit)
        assert max(limits) == 4
        assert limits.count(4) < 20, "tried once"
        assert limits.count(1) > 300


def test_rounds_that_are_held_or_behind_a_device_run_dry_say_nothing() -> None:
    machine = Machine()
    machine.limit.is_held = True
    machine.run(100, device=1e-3, once=1.5e-3, each=3e-4)
    assert machine.limit.limit == 1
    machine.limit.is_held = False
    for _ in range(100):
        machine.limit.restart()
        machine.run(1, device=1e-3, once=1.5e-3, each=3e-4)
    assert machine.limit.limit == 1


def refill(limit: RepeatLimit, device: float) -> float:
    """The share of the time that a device works which takes `device` seconds for a step, with prompts or without.

    600 short rows, 32 at once: at nearly every time one ends and another one takes its place. The host takes 6 ms for
    a round with prompts, and 2 ms and 0.3 for each time of a decode step.
    """
    config = SchedulerConfig(32, 4096, 64, 0, 0, True, frozenset())
    s = Scheduler(config, KVBlockManager(32 * 16 + 1, 4, 64, enable_prefix_caching=False))
    for i in range(600):
        add(s, i, num_prompt=4, max_tokens=20 + i * 7 % 30)
    now = device_end = busy = 0.0
    flight: list[tuple[SchedulerOutput, float]] = []
    while s.has_requests():
        if len(flight) < 2 and s.has_schedulable():
            out = s.schedule()
            now += 6e-3 if not out.num_decode_rows else 2e-3 + 3e-4 * out.times
            device_end = max(now, device_end) + device * out.times
            busy += device * out.times
            flight.append((out, device_end))
            if len(flight) < 2:
                continue
        out, end = flight.pop(0)
        asked, now = now, max(now, end)
        rows = [(s.requests.get(row.request_id), row.samples) for row in out.rows]
        left = [r.max_tokens - r.num_output_tokens if r is not None and samples else 0 for r, samples in rows]
        output = result([[[7] if i < num_left else [] for i in range(out.times)] for num_left in left])
        limit.round_done(out, output, now - asked, now)
        s.repeat_limit = limit.limit
        s.update_from_output(out, output)
    return busy / now


def test_rows_that_take_the_place_of_others_do_not_keep_the_device_waiting() -> None:
    held = RepeatLimit()
    held.is_held = True
    assert refill(held, device=1.5e-3) < 0.35
    assert refill(RepeatLimit(), device=1.5e-3) > 0.7
    slow = RepeatLimit()
    assert refill(slow, device=20e-3) > 0.98
    assert slow.limit == 1


def test_few_captures_among_the_rounds_say_nothing() -> None:
    machine = Machine()
    for _ in range(30):
        machine.run(20, device=5e-3, once=1e-3, each=5e-4)
        machine.run(1, device=5e-3, once=0.5, each=0.0)
    assert machine.limit.limit == 1


def test_not_where_answers_would_depend_on_it_nor_without_a_device_of_its_own(tmp_path: Path) -> None:
    harness = Harness(write_checkpoint(tmp_path), k=1, async_scheduling=True)
    worker, plan = replace(harness.config, device=torch.device("cuda")), harness.scheduler.config
    assert may_repeat(worker, plan)
    assert not may_repeat(replace(worker, by_ratio=True), plan)
    assert not may_repeat(harness.config, plan)
    assert not may_repeat(worker, replace(plan, async_scheduling=False))
