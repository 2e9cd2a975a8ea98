"""The parts of the memory budget add up, the recipe's word is kept, and too little memory is the user's to know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness
from tiny import write_checkpoint

from specgen.errors import SpecgenError
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.worker import memory
from specgen.worker import worker as worker_module
from specgen.worker.memory import LargestSteps, MemoryBudget, plan_memory
from specgen.worker.worker import Worker

CPU = torch.device("cpu")
MIB = 2**20


def nothing() -> None:
    pass


NO_STEPS = LargestSteps(nothing, nothing, nothing)


def assert_adds_up(budget: MemoryBudget) -> None:
    parts = budget.as_dict()
    total, limit = parts.pop("total"), parts.pop("limit")
    assert sum(parts.values()) == limit <= total
    assert all(part >= 0 for name, part in parts.items() if name != "left")
    assert parts["kv"] == budget.num_blocks * budget.block_bytes


def plan(
    monkeypatch: pytest.MonkeyPatch,
    measured: tuple[int, int, int],
    fraction: float = 0.5,
    useful: int = 10**9,
    num_blocks: int | None = None,
    graphs: int | None = None,
) -> MemoryBudget:
    """A plan over blocks of 1 MiB of a machine with (total, used, step peak) in MiB, and captured steps if it has."""
    parts = tuple(MIB * part for part in (*measured, graphs or 0))
    monkeypatch.setattr(memory, "_measure_cpu", lambda steps: parts[:3])
    monkeypatch.setattr(memory, "_measure_cuda", lambda device, steps, use_graphs: parts)
    device = CPU if graphs is None else torch.device("cuda")
    return plan_memory(device, NO_STEPS, MIB, fraction, useful, num_blocks, graphs is not None)


def test_the_pool_gets_what_the_rest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = plan(monkeypatch, (1000, 100, 50))
    assert (budget.num_blocks, budget.left) == (350, 0)
    assert_adds_up(budget)
    budget = plan(monkeypatch, (1000, 100, 50), graphs=70)
    assert (budget.num_blocks, budget.graphs) == (280, 70 * MIB)
    assert_adds_up(budget)


def test_no_more_blocks_than_rows_can_ever_use(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = plan(monkeypatch, (1000, 100, 50), useful=40)
    assert (budget.num_blocks, budget.left) == (40, 310 * MIB)
    assert_adds_up(budget)


@pytest.mark.parametrize("num_blocks", [2, 7, 600])
def test_the_recipes_word_is_kept(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Beyond the fraction too, as long as the memory is there."""
    budget = plan(monkeypatch, (1000, 100, 50), useful=5, num_blocks=num_blocks)
    assert budget.num_blocks == num_blocks
    assert_adds_up(budget)


@pytest.mark.parametrize(
    ("measured", "num_blocks"),
    [((1000, 500, 0), None), ((1000, 400, 100), None), ((1000, 449, 50), None), ((1000, 100, 50), 1)],
)
def test_too_little_memory_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, measured: tuple[int, int, int], num_blocks: int | None
) -> None:
    with pytest.raises(SpecgenError) as caught:
        plan(monkeypatch, measured, num_blocks=num_blocks)
    assert caught.value.hint


def test_more_blocks_than_the_machine_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, (1000, 100, 50), num_blocks=850).num_blocks == 850
    with pytest.raises(SpecgenError, match=r"engine\.num_blocks is 851"):
        plan(monkeypatch, (1000, 100, 50), num_blocks=851)


def test_blocks_by_word_leave_room_for_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, (1000, 600, 50), num_blocks=150, graphs=200).num_blocks == 150
    with pytest.raises(SpecgenError, match=r"0\.15 GiB of KV, and 0\.15 GiB are free"):
        plan(monkeypatch, (1000, 600, 50), num_blocks=151, graphs=200)


def test_too_little_memory_counts_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecgenError, match=r"of 0\.88 GiB allowed, 0\.59 are in use and a step takes 0\.34"):
        plan(monkeypatch, (1000, 600, 50), fraction=0.9, graphs=300)


def test_the_peak_of_a_step_is_measured() -> None:
    def step() -> None:
        torch.ones(48 * MIB, dtype=torch.uint8)

    budget = plan_memory(CPU, LargestSteps(nothing, step, nothing), MIB, 0.9, 10, None, False)
    assert budget.step_peak > 40 * MIB
    assert budget.used > 50 * MIB and budget.total > budget.used
    assert_adds_up(budget)


def test_memory_kept_by_malloc_does_not_hide_a_step() -> None:
    """400 MiB in chunks that malloc keeps: a step must neither live in them nor be measured while they are returned."""
    torch.ones(31 * MIB, dtype=torch.uint8)  # once freed, malloc takes what is smaller from its heap
    kept = [torch.ones(20 * MIB, dtype=torch.uint8) for _ in range(20)]
    last = torch.ones(MIB, dtype=torch.uint8)
    del kept

    def step() -> None:
        torch.ones(8 * MIB, dtype=torch.uint8)

    assert plan_memory(CPU, LargestSteps(nothing, step, nothing), MIB, 0.9, 10, None, False).step_peak > 6 * MIB
    del last


def test_a_workers_pool_is_its_budget(tiny: Path) -> None:
    """Target and draft layers share every block (U46: nobody claims the memory twice)."""
    for k, num_layers in ((0, 2), (2, 3)):
        config = Harness(tiny, k=k, num_blocks=33, max_num_seqs=3, max_model_len=30).config
        worker = Worker(config)
        assert worker.kv_caches.shape[:3] == (num_layers, 33, 4)
        assert worker.kv_caches.nbytes == worker.budget.kv == 33 * worker.block_bytes
        assert_adds_up(worker.budget)
        worker = Worker(replace(config, num_blocks=None))
        assert worker.budget.num_blocks == 3 * 8 + 1, "as many as 3 rows of 30 tokens can use, and the null block"
        assert worker.kv_caches.nbytes == worker.budget.kv
        assert_adds_up(worker.budget)


def test_a_worker_without_room_for_kv_says_so(tiny: Path) -> None:
    config = Harness(tiny, max_num_seqs=2, max_model_len=30).config
    with pytest.raises(SpecgenError, match="no memory is left for KV"):
        Worker(replace(config, num_blocks=None, memory_fraction=1e-6))


def test_the_measured_step_leaves_nothing_behind(tiny: Path) -> None:
    """Slots are as new after the largest step was tried."""
    harness = Harness(tiny, k=2, max_num_seqs=3, max_model_len=30)
    assert bool((harness.worker.kv_caches == 0).all())
    assert not harness.scheduler.requests


@pytest.mark.parametrize(
    ("left", "max_num_seqs", "want"),
    [(161 * MIB, 4, 128), (160 * MIB, 4, 64), (161 * MIB, 1, 64)],
    ids=["twice as many", "no room", "never filled"],
)
def test_steps_have_twice_the_tokens_where_memory_is_left(
    left: int, max_num_seqs: int, want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(write_checkpoint(tmp_path), k=1, budget=64, max_num_seqs=max_num_seqs, max_model_len=64)
    assert harness.worker.config.max_num_batched_tokens == 64
    measured: list[int] = []

    def plan(device: torch.device, steps: LargestSteps, block_bytes: int, *args: object) -> MemoryBudget:
        steps.forward()
        steps.rest()
        num_blocks = 40 + len(measured)
        limit = left + num_blocks * block_bytes + 80 * MIB
        return MemoryBudget(2000 * MIB, limit, 0, 60 * MIB, 20 * MIB, block_bytes, num_blocks)

    forward = DeepseekV3ForCausalLM.forward

    def note(self: DeepseekV3ForCausalLM, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        measured.append(len(input_ids))
        return forward(self, input_ids, *args)

    monkeypatch.setattr(worker_module, "plan_memory", plan)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "forward", note)
    worker = Worker(replace(harness.worker.config, widens_steps=True))
    assert worker.config.max_num_batched_tokens == want
    most = min(want, max_num_seqs * 63)
    assert measured[-1] == most and len(measured) == 1 + (want == 128)
    assert worker.budget.num_blocks == worker.kv_caches.shape[1] == 40 + len(measured), "the last plan holds"
