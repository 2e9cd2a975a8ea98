"""How much memory there is, how much a step needs, and how many KV blocks that leaves: measured, not guessed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specgen.errors import RecipeError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the memory goes, in bytes. `limit = used + step_peak + graphs + kv + left`.

    total: of the device, or the machine's available memory. limit: the fraction of it that may be used. used: weights,
    per-slot state and the process itself. step_peak: activations of the largest step, measured; where steps are
    captured, of what follows the target. graphs: those of the largest decode step, or of the largest step's target,
    which share the graphs' memory; measured. kv: the pool.
    """

    total: int
    limit: int
    used: int
    step_peak: int
    graphs: int
    block_bytes: int
    num_blocks: int

    @property
    def kv(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def left(self) -> int:
        """Bytes of the limit that nobody uses."""
        return self.limit - self.used - self.step_peak - self.graphs - self.kv

    def as_dict(self) -> dict[str, int]:
        """All parts, by name."""
        return {
            "total": self.total,
            "limit": self.limit,
            "used": self.used,
            "step_peak": self.step_peak,
            "graphs": self.graphs,
            "kv": self.kv,
            "left": self.left,
        }


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """What takes the most memory.

    `forward` and then `rest` are one step of the most tokens and logits rows: the target, and all that follows it;
    `decode` is a step of the most rows that only decode. `pool_bytes`: their KV, there as long as they are.
    """

    forward: Callable[[], None]
    rest: Callable[[], object]
    decode: Callable[[], None]
    pool_bytes: int = 0


def _status_bytes(key: str, path: str = "/proc/self/status") -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _cpu_available() -> int:
    available = _status_bytes("MemAvailable", "/proc/meminfo")
    for path in _CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            available = min(available, int(text) - _status_bytes("VmRSS"))
    return available


def available_memory() -> tuple[int, int]:
    """(total, free) of the machine for this process, in bytes; (0, 0) where there is no procfs."""
    if not Path("/proc/self/status").is_file():
        return 0, 0
    free = _cpu_available()
    return free + _status_bytes("VmRSS"), free


def _release_free_memory() -> None:
    """Give back what is not in use: a step that reused it would seem small, one that freed it smaller than it is."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's; other C libraries keep less
        ctypes.CDLL(None).malloc_trim(0)


def _measure_cpu(steps: LargestSteps) -> tuple[int, int, int]:
    """(total, used, step_peak) of the process; the peak is what the resident set grew by, at its highest."""
    if not Path("/proc/self/status").is_file():  # no procfs (macOS): the machine's memory is not known this way
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _run(steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return before + 4 * 2**30, before, peak
    _release_free_memory()
    used = _status_bytes("VmRSS")
    total = _cpu_available() + used
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    _run(steps)
    return total, used, max(0, _status_bytes("VmHWM") - used)


def _run(steps: LargestSteps) -> None:
    steps.forward()
    steps.rest()


def _measure_cuda(device: torch.device, steps: LargestSteps, use_graphs: bool) -> tuple[int, int, int, int]:
    """(total, used, step_peak, graphs) of the device. `used` counts other processes' memory too."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    peaks = []
    for run in (steps.forward, steps.rest, steps.decode):
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - steps.pool_bytes
    forward, rest, decode = peaks
    if use_graphs:
        return total, used, rest, max(forward, decode)
    return total, used, max(peaks), 0


def plan_memory(
    device: torch.device,
    steps: LargestSteps,
    block_bytes: int,
    memory_fraction: float,
    max_useful_blocks: int,
    num_blocks: int | None,
    use_graphs: bool,
) -> MemoryBudget:
    """Runs the largest steps once and gives what remains of `memory_fraction` to KV, at most what rows can ever use.

    `num_blocks` not None is the recipe's word, and kept if the device has the memory; the null block is among them.

    Raises:
        RecipeError: no block fits, or not as many as the recipe says.
    """
    if num_blocks is not None and num_blocks < 2:
        raise RecipeError(f"engine.num_blocks is {num_blocks}", hint="at least 2: the first block is never used")
    graphs = 0
    if device.type == "cuda":
        total, used, peak, graphs = _measure_cuda(device, steps, use_graphs)
    else:
        total, used, peak = _measure_cpu(steps)
    limit = int(total * memory_fraction)
    if num_blocks is None:
        num_blocks = min(max_useful_blocks, (limit - used - peak - graphs) // block_bytes)
    elif num_blocks * block_bytes > total - used - peak - graphs:
        raise RecipeError(
            f"engine.num_blocks is {num_blocks}: that is {num_blocks * block_bytes / 2**30:.2f} GiB of KV, and "
            f"{max(0, total - used - peak - graphs) / 2**30:.2f} GiB are free",
            hint="leave it out, and what fits is measured",
        )
    if num_blocks < 2:
        raise RecipeError(
            f"no memory is left for KV: of {limit / 2**30:.2f} GiB allowed, {used / 2**30:.2f} are in use and a step "
            f"takes {(peak + graphs) / 2**30:.2f}",
            hint="raise engine.memory_fraction, or lower engine.max_num_batched_tokens or engine.max_num_seqs",
        )
    return MemoryBudget(total, limit, used, peak, graphs, block_bytes, num_blocks)
