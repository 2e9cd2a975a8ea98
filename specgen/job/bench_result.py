"""What a benchmark measured, and the figures that follow from it.

Knows times, counts and the cost model's floor. Does not run anything.

Two clocks: a round's wall time (tokens/s), and the decode-only steps within it, as the engine's timer saw them. Of
these, the figures are of the number of rows at which most of the time was spent: the steady state, without the first
steps and without the tail in which rows end one after another.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specgen.job.floor import Ceilings, Cost, CostModel
from specgen.job.peer import PeerResult
from specgen.job.trace import Idle
from specgen.stats import SpecStats
from specgen.worker.timing import STEP_PARTS, DecodeTimes

# Parts of a step, as the engine counts them; "graph" is a decode step that ran as one CUDA graph, with all its parts.
BENCH_PARTS = ("total", "graph", "target", "sampling", "draft")


class Shape(NamedTuple):
    """Rows at once, tokens of each prompt, tokens of each answer."""

    rows: int
    prompt_tokens: int
    output_tokens: int

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


class DecodeFigures(NamedTuple):
    """A steady decode step of `rows` rows with `context` tokens each; all times in seconds.

    period: from the start of a step to the start of the next. device: from a step's first operation to its last.
    parts: target, sampling and draft, None where they could not be told apart. cost: what it must read and compute,
    floor: the least time for it; None without a cost model of this kind of model.
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
        """The time between two steps, in which the device has no work."""
        return max(0.0, self.period - self.device)

    @property
    def floor_share(self) -> float | None:
        """The floor over the time it took; 1 would be a perfect step."""
        return self.floor / self.period if self.floor is not None else None

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


class Machine(NamedTuple):
    """What floors are reckoned with; without a cost model there are none."""

    ceilings: Ceilings | None
    cost_model: CostModel | None


NO_MACHINE = Machine(None, None)


@dataclass(slots=True)
class Side:
    """All rounds of one configuration (K drafts a step); every figure is a median over them.

    parts: decode steps of a further pass, in which their parts were timed, if the rounds could not. idle: the device's
    idle shares in a trace, if there is one.
    """

    num_tokens: int
    tokens_per_step: int = 0
    rounds: list[Round] = field(default_factory=list)
    parts: Mapping[int, DecodeTimes] = field(default_factory=dict)
    idle: Idle | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return statistics.median(r.tokens_per_second for r in self.rounds)

    def ms_per_step(self, part: str) -> float:
        """Milliseconds a step spent in `part`, see `Round.ms_per_step`."""
        return statistics.median(r.ms_per_step(part) for r in self.rounds)

    @property
    def spec(self) -> SpecStats:
        """Counts of the last round (the same in every round, as the tokens are)."""
        return self.rounds[-1].spec

    @property
    def steady_rows(self) -> int | None:
        """The number of rows at which decoding spent most of its time; None if no two steps followed each other."""
        decode = self.rounds[-1].decode
        return max((n for n, t in decode.items() if t.periods), key=lambda n: decode[n].period_seconds, default=None)

    def decode(self, context: float, machine: Machine) -> DecodeFigures | None:
        """Return the steady decode step, with `context` tokens a row; None if there is none."""
        rows = self.steady_rows
        if rows is None:
            return None
        times = [r.decode[rows] for r in self.rounds if rows in r.decode and r.decode[rows].periods]
        cost = machine.cost_model.decode(rows, context, self.num_tokens) if machine.cost_model is not None else None
        return DecodeFigures(
            rows=rows,
            context=context,
            period=statistics.median(t.period_seconds / t.periods for t in times),
            device=statistics.median(t.seconds / t.steps for t in times),
            parts=self._parts(rows, times),
            cost=cost,
            floor=cost.seconds(machine.ceilings) if cost is not None and machine.ceilings is not None else None,
        )

    def _parts(self, rows: int, times: list[DecodeTimes]) -> dict[str, float] | None:
        if rows in self.parts:
            times = [self.parts[rows]]
        times = [t for t in times if t.timed_steps]
        if not times:
            return None
        return {part: statistics.median(t.part_seconds[part] / t.timed_steps for t in times) for part in STEP_PARTS}

    def run_floor_share(self, shape: Shape, machine: Machine) -> float | None:
        """Return the floor of the whole run, prompts included, over its wall time; None without a cost model."""
        model, ceilings = machine.cost_model, machine.ceilings
        if model is None or ceilings is None:
            return None
        context = shape.prompt_tokens + shape.output_tokens / 2
        tokens_per_step = self.tokens_per_step or shape.prompt_tokens
        prefill = model.prefill(shape.rows, shape.prompt_tokens, tokens_per_step, self.num_tokens).seconds(ceilings)
        last = self.rounds[-1]
        decode = sum(
            times.steps * model.decode(rows, context, self.num_tokens).seconds(ceilings)
            for rows, times in last.decode.items()
        )
        return (prefill + decode) / statistics.median(r.seconds for r in self.rounds)


@dataclass(slots=True)
class Case:
    """One workload: a shape, or (None) the rows of a file; one side for every K."""

    shape: Shape | None
    rows: int
    prompt_tokens: int
    sides: list[Side]

    @property
    def plain(self) -> Side | None:
        """The side without drafts, if it was measured."""
        return next((side for side in self.sides if side.num_tokens == 0), None)

    def ratio(self, side: Side) -> float | None:
        """Return a side's output tokens/s over the plain one's."""
        return side.tokens_per_second / self.plain.tokens_per_second if self.plain is not None else None

    def context(self, side: Side) -> float:
        """Tokens that a row holds in the middle of its answer, as a mean over rows."""
        return (self.prompt_tokens + side.rounds[-1].completion_tokens / 2) / self.rows

    @property
    def num_different_rows(self) -> int:
        """Rows whose token ids were not the same in every round of every side; exactness says 0."""
        rounds = [r for side in self.sides for r in side.rounds]
        first = rounds[0].token_ids
        return sum(any(r.token_ids[row] != ids for r in rounds[1:]) for row, ids in first.items())


@dataclass(slots=True)
class BenchResult:
    """What a benchmark measured. is_synthetic: drafts were accepted by lot, so that tokens say nothing."""

    cases: list[Case]
    machine: Machine = NO_MACHINE
    is_synthetic: bool = False
    peer: PeerResult | None = None

    @property
    def num_rows_like_peer(self) -> int:
        """Rows whose token ids are the peer's."""
        ours = list(self.cases[-1].sides[-1].rounds[-1].token_ids.values())
        theirs = self.peer.token_ids if self.peer is not None else []
        return sum(a == b for a, b in zip(ours, theirs, strict=False))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values: the content of `--json`."""
        ceilings = self.machine.ceilings
        return {
            "ceilings": ceilings._asdict() if ceilings is not None else None,
            "cases": [self._case(case) for case in self.cases],
            "peer": self.peer.as_dict() if self.peer is not None else None,
        }

    def _case(self, case: Case) -> dict[str, object]:
        return {
            "shape": str(case.shape) if case.shape is not None else None,
            "rows": case.rows,
            "prompt_tokens": case.prompt_tokens,
            "rounds": len(case.sides[0].rounds),
            "sides": [self._side(case, side) for side in case.sides],
            "equal": None if self.is_synthetic else case.num_different_rows == 0,
            "different_rows": None if self.is_synthetic else case.num_different_rows,
        }

    def _side(self, case: Case, side: Side) -> dict[str, object]:
        decode = side.decode(case.context(side), self.machine)
        share = side.run_floor_share(case.shape, self.machine) if case.shape is not None else None
        ratio = case.ratio(side)
        return {
            "num_tokens": side.num_tokens,
            "tokens_per_second": round(side.tokens_per_second, 2),
            "tokens_per_second_rounds": [round(r.tokens_per_second, 2) for r in side.rounds],
            "ratio_to_plain": round(ratio, 4) if ratio is not None else None,
            "seconds": round(statistics.median(r.seconds for r in side.rounds), 4),
            "completion_tokens": side.rounds[-1].completion_tokens,
            "steps": side.rounds[-1].engine.get("steps", 0.0),
            "ms_per_step": {part: round(side.ms_per_step(part), 4) for part in BENCH_PARTS},
            "decode": decode.as_dict() if decode is not None else None,
            "run_floor_share": round(share, 4) if share is not None else None,
            "idle": {name: round(share, 4) for name, share in side.idle._asdict().items()} if side.idle else None,
            "spec": {
                **side.spec.as_dict(),
                "mean_accepted_length": round(side.spec.mean_accepted_length, 4),
                "acceptance_rate": round(side.spec.acceptance_rate, 4),
                "acceptance_per_pos": [round(rate, 4) for rate in side.spec.acceptance_per_pos],
            },
        }
