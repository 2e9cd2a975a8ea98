"""One figure each of a benchmark: a pass, a steady decode step and its floor, an engine's start.

Knows times, counts and the cost model's floor; not how passes are compared, nor how they are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specgen.job.floor import Ceilings, Cost, CostModel
from specgen.stats import SpecStats
from specgen.worker.startup import StartUp
from specgen.worker.timing import DecodeTimes

# Parts of a step, as the engine counts them; "graph" is a decode step that ran as one CUDA graph, with all its parts.
BENCH_PARTS = ("total", "graph", "target", "sampling", "draft")


class Shape(NamedTuple):
    """Rows, all at once unless the engine takes fewer, tokens of each prompt, tokens of each answer."""

    rows: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows in the end."""
        return self.rows * (self.prompt_tokens + self.output_tokens)

    def __str__(self) -> str:
        """As it is written on the command line."""
        return "x".join(map(str, self))


@dataclass(frozen=True, slots=True)
class Round:
    """One timed pass over all rows.

    seconds: from the first row given to the last one ended. engine: what its counters gained meanwhile. decode: the
    decode-only steps, by number of rows.
    """

    seconds: float
    completion_tokens: int
    spec: SpecStats
    engine: dict[str, float]
    token_ids: dict[int, list[int]] = field(repr=False)
    decode: Mapping[int, DecodeTimes] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.completion_tokens / self.seconds

    def ms_per_step(self, part: str) -> float:
        """Milliseconds a step spent in `part`, one of `BENCH_PARTS`; "total" is the wall clock."""
        steps = self.engine.get("steps", 0.0)
        seconds = self.seconds if part == "total" else self.engine.get(f"{part}_seconds", 0.0)
        return 1e3 * seconds / steps if steps else 0.0


class Machine(NamedTuple):
    """What floors are reckoned with; without a cost model there are none."""

    ceilings: Ceilings | None
    cost_model: CostModel | None


NO_MACHINE = Machine(None, None)


class DecodeFigures(NamedTuple):
    """A steady decode step of `rows` rows with `context` tokens each; all times in seconds.

    period: from the start of a step to the start of the next. device: from a step's first operation to its last. Both
    are medians of single steps. parts: target, sampling and draft, None where they could not be told apart. cost: what
    it must read and compute, floor: the least time for it; None without a cost model of this kind of model.
    """

    rows: int
    context: float
    period: float
    device: float
    parts: dict[str, float] | None
    cost: Cost | None
    floor: float | None

    @property
    def gap(self) -> float:
        """The time between two steps, in which the device copies tokens to the host or has no work."""
        return max(0.0, self.period - self.device)

    @property
    def floor_share(self) -> float | None:
        """The floor over the time it took; 1 would be a perfect step."""
        return self.floor / self.period if self.floor is not None else None

    def attention_floor(self, machine: Machine) -> float | None:
        """The floor of the attention alone, of target and draft layers."""
        if self.cost is None or machine.ceilings is None:
            return None
        return sum(op.seconds(machine.ceilings) for op in self.cost.ops if op.name == "attention")

    def as_dict(self) -> dict[str, object]:
        """Return the figures as plain JSON values."""
        cost = self.cost
        return {
            "rows": self.rows,
            "context": round(self.context, 1),
            "ms": round(1e3 * self.period, 4),
            "device_ms": round(1e3 * self.device, 4),
            "gap_ms": round(1e3 * self.gap, 4),
            **{f"{part}_ms": round(1e3 * seconds, 4) for part, seconds in (self.parts or {}).items()},
            "floor_ms": round(1e3 * self.floor, 4) if self.floor is not None else None,
            "floor_share": round(self.floor_share, 4) if self.floor_share is not None else None,
            "bytes": round(cost.num_bytes) if cost is not None else None,
            "flops": round(cost.flops) if cost is not None else None,
            "bytes_per_second": round(cost.num_bytes / self.period) if cost is not None else None,
            "flops_per_second": round(cost.flops / self.period) if cost is not None else None,
        }


@dataclass(frozen=True, slots=True)
class EngineStart:
    """How one engine came up, and what room it has.

    first_seconds: of the passes before anything is timed, in which graphs are captured and kernels compiled. kv_tokens:
    that its pool holds, kv_room: that the memory budget would hold, if rows could use them; memory: bytes by use. None
    where the engine does not say.
    """

    num_tokens: int
    exactness: str
    is_headless: bool
    start_up: StartUp
    first_seconds: float
    kv_tokens: int | None = None
    kv_room: int | None = None
    memory: Mapping[str, int] | None = None

    @classmethod
    def of(
        cls,
        num_tokens: int,
        exactness: str,
        is_headless: bool,
        description: Mapping[str, object],
        start_up: StartUp,
        first_seconds: float,
    ) -> EngineStart:
        """Return what an engine says of itself."""
        kv_tokens, memory = description.get("kv_tokens"), description.get("memory")
        return cls(
            num_tokens,
            exactness,
            is_headless,
            start_up,
            first_seconds,
            kv_tokens if isinstance(kv_tokens, int) else None,
            _kv_room(description),
            memory if isinstance(memory, Mapping) else None,
        )

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values."""
        times = self.start_up._asdict()
        rate = self.start_up.weight_bytes / self.start_up.weight_seconds if self.start_up.weight_seconds else None
        return {
            "num_tokens": self.num_tokens,
            "exactness": self.exactness,
            "headless": self.is_headless,
            **{name: round(value, 4) if isinstance(value, float) else value for name, value in times.items()},
            "weight_bytes_per_second": round(rate) if rate is not None else None,
            "first_seconds": round(self.first_seconds, 4),
            "kv_tokens": self.kv_tokens,
            "kv_room": self.kv_room,
            "memory": dict(self.memory) if self.memory is not None else None,
        }


def _kv_room(description: Mapping[str, object]) -> int | None:
    """Tokens of the pool, and of as much more of it as the unused memory would hold."""
    memory, there = description.get("memory"), description.get("kv_tokens")
    if not isinstance(memory, Mapping) or not isinstance(there, int) or not memory.get("kv"):
        return None
    return there + max(0, int(memory["left"] / memory["kv"] * there))
