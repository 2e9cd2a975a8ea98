"""The step timer's sums, by a clock that a test moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specgen.worker import timing
from specgen.worker.timing import DecodeTimes, StepTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Returns a function that lets so many seconds pass."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def run_step(
    timer: StepTimer, clock: Callable[[float], None], decode_rows: int, scale: float = 1.0, continues: bool = True
) -> None:
    timer.begin_step(decode_rows, continues)
    for part, seconds in (("target", 4.0), ("sampling", 2.0), ("draft", 1.0)):
        timer.begin(part)
        clock(scale * seconds)
    timer.end()


def test_decode_steps_are_summed_by_their_rows_and_follow_one_another(clock: Callable[[float], None]) -> None:
    timer = StepTimer(torch.device("cpu"))
    run_step(timer, clock, 0, scale=10)
    clock(5.0)
    run_step(timer, clock, 8)  # to the next: 7 + 3
    clock(3.0)
    run_step(timer, clock, 8)  # to the next: 7 + 1
    clock(1.0)
    run_step(timer, clock, 2)  # a mixed step comes next: no period
    clock(9.0)
    run_step(timer, clock, 0)
    run_step(timer, clock, 8)
    assert timer.seconds == pytest.approx({"graph": 0, "target": 60, "sampling": 30, "draft": 15})
    eight, two = timer.decode_times[8], timer.decode_times[2]
    assert (eight.steps, eight.seconds, eight.periods, eight.period_seconds) == (3, 21.0, 2, 18.0)
    assert (two.steps, two.seconds, two.periods, two.period_seconds) == (1, 7.0, 0, 0.0)
    assert (eight.timed_steps, eight.part_seconds) == (3, {"target": 12.0, "sampling": 6.0, "draft": 3.0})


def test_time_with_nothing_to_do_is_nobodys(clock: Callable[[float], None]) -> None:
    timer = StepTimer(torch.device("cpu"))
    run_step(timer, clock, 3)
    run_step(timer, clock, 3)
    clock(1000.0)  # all rows have ended, and others came
    run_step(timer, clock, 8, continues=False)
    run_step(timer, clock, 8)
    assert (timer.decode_times[3].periods, timer.decode_times[3].period_seconds) == (1, 7.0)
    assert (timer.decode_times[8].periods, timer.decode_times[8].period_seconds) == (1, 7.0)


def test_a_step_still_under_way_is_waited_for_and_counted_at_once(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last step of one pass would be found among those of the next."""

    class Event:
        is_done = False

        def __init__(self, **_: bool) -> None: ...

        def record(self) -> None:
            self.at = timing.time.perf_counter()

        def query(self) -> bool:
            return self.is_done

        def synchronize(self) -> None:
            self.is_done = True

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    run_step(timer, clock, 3)
    assert timer.seconds["target"] == 0
    assert (timer.decode_times[3].steps, timer.decode_times[3].seconds) == (1, 7.0)
    assert timer.decode_times[3].steps == 1


def test_what_came_since_is_told_from_a_copy(clock: Callable[[float], None]) -> None:
    timer = StepTimer(torch.device("cpu"))
    run_step(timer, clock, 3)
    before = timer.decode_times[3]
    run_step(timer, clock, 3)
    assert before.steps == 1
    gained = timer.decode_times[3].since(before)
    assert (gained.steps, gained.periods, gained.period_seconds) == (1, 1, 7.0)
    assert gained.part_seconds["target"] == 4.0


def test_the_last_steps_are_remembered_one_by_one(clock: Callable[[float], None], monkeypatch: Any) -> None:
    monkeypatch.setattr(timing, "_REMEMBERED", 4)
    timer = StepTimer(torch.device("cpu"))
    for _ in range(3):
        run_step(timer, clock, 2)
    before = timer.decode_times[2]
    for scale in (1.0, 1.0, 10.0):
        run_step(timer, clock, 2, scale=scale)
    gained = timer.decode_times[2].since(before)
    assert gained.last_seconds == [7.0, 7.0, 70.0]
    assert gained.last_periods == [7.0, 7.0, 7.0]
    assert gained.median_seconds == 7.0 and gained.seconds == 84.0
    for _ in range(20):
        run_step(timer, clock, 2)
    times = timer.decode_times[2]
    assert times.steps == 26 and 4 <= len(times.last_seconds) < 8, "the oldest are forgotten"
    assert DecodeTimes(2, 3.0, 4, 8.0).median_period == 2.0, "the mean where single steps are not known"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="events inside CUDA graphs need CUDA")
def test_parts_within_a_graph_are_told_in_detail() -> None:
    device = torch.device("cuda")
    timer = StepTimer(device)
    small, large = (torch.zeros(size, device=device) for size in (1 << 20, 1 << 28))

    def step() -> None:
        timer.mark_captured("target")
        large.add_(1)
        timer.mark_captured("sampling")
        small.add_(1)
        timer.mark_captured("draft")
        timer.mark_captured("")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for detailed in (False, True):
        timer.detailed = detailed
        for _ in range(3):
            timer.begin_step(4)
            timer.begin("graph")
            graph.replay()
            timer.end()
    torch.cuda.synchronize()
    timer.begin_step(0)
    timer.begin("target")
    timer.end()
    times = timer.decode_times[4]
    assert times.timed_steps == 3
    parts = {part: seconds / 3 for part, seconds in times.part_seconds.items()}
    assert parts["target"] > 5 * parts["sampling"] > 0
    assert parts["draft"] < parts["target"] / 5
    assert sum(parts.values()) == pytest.approx(times.seconds / times.steps, rel=0.3)
