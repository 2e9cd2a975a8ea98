"""Threads follow the faster side, losing probes get rarer, and the engine's tokens do not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.worker.cpu_threads import CpuThreads


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(threads: CpuThreads, num_steps: int, seconds: Callable[[int], float]) -> list[int]:
    """The counts that the steps ran with, each taking `seconds(count)`."""
    used = []
    for _ in range(num_steps):
        used.append(threads.count)
        threads.observe(seconds(threads.count))
        assert torch.get_num_threads() == threads.count or len(used) < 3
    return used


def test_a_busy_machine_gets_one_thread_soon() -> None:
    torch.set_num_threads(2)
    used = run(CpuThreads(2), 100, lambda count: 0.4 if count == 2 else 0.02)
    assert used[:3] == [2, 2, 2]
    assert used.count(2) < 10, "a probe that is twice as slow ends after one step"
    assert used[-1] == 1


def test_a_quiet_machine_keeps_all_threads() -> None:
    torch.set_num_threads(2)
    used = run(CpuThreads(2), 600, lambda count: 0.015 if count == 2 else 0.02)
    assert used.count(1) < 0.06 * 600


def test_it_comes_back_when_the_machine_is_quiet_again() -> None:
    torch.set_num_threads(2)
    threads = CpuThreads(2)
    run(threads, 50, lambda count: 0.4 if count == 2 else 0.02)
    used = run(threads, 300, lambda count: 0.015 if count == 2 else 0.02)
    assert used[-1] == 2


def test_the_next_one_in_the_process_finds_all_threads() -> None:
    torch.set_num_threads(2)
    threads = CpuThreads(2)
    run(threads, 20, lambda count: 0.4 if count == 2 else 0.02)
    assert torch.get_num_threads() == 1
    threads.restore()
    assert torch.get_num_threads() == 2


def test_a_small_gain_is_no_reason() -> None:
    torch.set_num_threads(2)
    used = run(CpuThreads(2), 50, lambda count: 0.0195 if count == 1 else 0.02)
    assert used[-1] == 2
