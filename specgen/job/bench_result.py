"""What a benchmark measured, and the figures that follow from it.

Knows times, counts and the cost model's floor. Does not run anything.

Two clocks: a round's wall time (tokens/s), and the decode-only steps within it, as the engine's timer saw them. Of
these, the figures are of the number of rows at which most of the time was spent: the steady state, without the first
steps and without the tail in which rows end one after another.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specgen.job.bench_figures import BENCH_PARTS, NO_MACHINE, DecodeFigures, EngineStart, Machine, Round, Shape
from specgen.job.peer import PeerResult
from specgen.job.trace import Idle, Traced
from specgen.stats import SpecStats
from specgen.worker.timing import STEP_PARTS, DecodeTimes


@dataclass(slots=True)
class Side:
    """All rounds of one configuration (K drafts a step); every figure is a median over them.

    is_headless: the model was taken as if it had no draft layers. alone: a further pass whose prompts counted as
    computed, where in the rounds too few steps did nothing but decode all rows. parts: decode steps of a further pass,
    in which their parts were timed, if the rounds could not. idle, traced: from a trace, if there is one.
    """

    num_tokens: int
    tokens_per_step: int = 0
    exactness: str = "exact"
    is_headless: bool = False
    rounds: list[Round] = field(default_factory=list)
    alone: Round | None = None
    parts: Mapping[int, DecodeTimes] = field(default_factory=dict)
    idle: Idle | None = None
    traced: Traced | None = None

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

    def has_steps_of(self, rows: int, num: int) -> bool:
        """Whether in the last round so many steps of `rows` rows, that only decoded, were followed by another."""
        times = self.rounds[-1].decode.get(rows)
        return times is not None and times.periods >= num

    @property
    def _decode_rounds(self) -> list[Round]:
        return self.rounds if self.alone is None else [self.alone]

    @property
    def steady_rows(self) -> int | None:
        """The number of rows at which decoding spent most of its time; None if no two steps followed each other."""
        decode = self._decode_rounds[-1].decode
        return max((n for n, t in decode.items() if t.periods), key=lambda n: decode[n].period_seconds, default=None)

    @property
    def num_steady_steps(self) -> int:
        """Steps of that many rows in the last pass, each followed by another."""
        rows = self.steady_rows
        return self._decode_rounds[-1].decode[rows].periods if rows is not None else 0

    @property
    def knows_parts(self) -> bool:
        """Whether the parts of the steady steps were timed."""
        rows = self.steady_rows
        return rows is not None and self._decode_rounds[-1].decode[rows].timed_steps > 0

    def decode(self, context: float, machine: Machine) -> DecodeFigures | None:
        """Return the steady decode step, with `context` tokens a row; None if there is none."""
        rows = self.steady_rows
        if rows is None:
            return None
        times = [r.decode[rows] for r in self._decode_rounds if rows in r.decode and r.decode[rows].periods]
        cost = machine.cost_model.decode(rows, context, self.num_tokens) if machine.cost_model is not None else None
        return DecodeFigures(
            rows=rows,
            context=context,
            period=statistics.median(t.median_period for t in times),
            device=statistics.median(t.median_seconds for t in times),
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

    def run_floor_share(self, shape: Shape, machine: Machine, *, with_prompts: bool = True) -> float | None:
        """Return the floor of the whole run over its wall time; None without a cost model.

        with_prompts: they were computed.
        """
        model, ceilings = machine.cost_model, machine.ceilings
        if model is None or ceilings is None:
            return None
        context = shape.prompt_tokens + shape.output_tokens / 2
        prefill = 0.0
        if with_prompts:
            cost = model.prefill(shape.rows, shape.prompt_tokens, self.tokens_per_step, self.num_tokens)
            prefill = cost.seconds(ceilings)
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

    def plain_of(self, side: Side) -> Side | None:
        """The side without drafts that `side` is compared with, if it was measured: on the same kind of products."""
        alike = (s for s in self.sides if s.num_tokens == 0 and s.exactness == side.exactness)
        return min(alike, key=lambda s: s.is_headless, default=None)

    def ratio(self, side: Side) -> float | None:
        """Return a side's output tokens/s over the plain one's."""
        plain = self.plain_of(side)
        return side.tokens_per_second / plain.tokens_per_second if plain is not None else None

    def other(self, side: Side, exactness: str) -> Side | None:
        """The side that differs from `side` in its products alone."""
        key = (side.num_tokens, side.is_headless, exactness)
        return next((s for s in self.sides if (s.num_tokens, s.is_headless, s.exactness) == key), None)

    def context(self, side: Side) -> float:
        """Tokens that a row holds in the middle of its answer, as a mean over rows."""
        return (self.prompt_tokens + side.rounds[-1].completion_tokens / 2) / self.rows

    @property
    def num_different_rows(self) -> int:
        """Rows whose token ids were not the same in every round of every exact side; exactness says 0.

        Without an exact side, of all.
        """
        sides = [side for side in self.sides if side.exactness == "exact"] or self.sides
        rounds = [r for side in sides for r in side.rounds]
        first = rounds[0].token_ids
        return sum(any(r.token_ids[row] != ids for r in rounds[1:]) for row, ids in first.items())


@dataclass(slots=True)
class BenchResult:
    """What a benchmark measured, one start for each engine.

    is_synthetic: drafts were accepted by lot; skips_prompts: prompts counted as computed. Then tokens say nothing.
    """

    cases: list[Case]
    machine: Machine = NO_MACHINE
    is_synthetic: bool = False
    skips_prompts: bool = False
    starts: list[EngineStart] = field(default_factory=list)
    peer: PeerResult | None = None

    def joined(self, other: BenchResult) -> BenchResult:
        """Return both as one: the other's sides behind these, of the same workloads."""
        cases = [
            replace(mine, sides=mine.sides + theirs.sides) for mine, theirs in zip(self.cases, other.cases, strict=True)
        ]
        return replace(self, cases=cases, starts=self.starts + other.starts)

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens are those that the model gives."""
        return not self.is_synthetic and not self.skips_prompts

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
            "skips_prompts": self.skips_prompts,
            "engines": [start.as_dict() for start in self.starts],
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
            "equal": case.num_different_rows == 0 if self.has_tokens else None,
            "different_rows": case.num_different_rows if self.has_tokens else None,
        }

    def _side(self, case: Case, side: Side) -> dict[str, object]:
        decode = side.decode(case.context(side), self.machine)
        share = self.run_floor_share(case, side)
        ratio = case.ratio(side)
        return {
            "num_tokens": side.num_tokens,
            "exactness": side.exactness,
            "headless": side.is_headless,
            "tokens_per_second": round(side.tokens_per_second, 2),
            "tokens_per_second_rounds": [round(r.tokens_per_second, 2) for r in side.rounds],
            "ratio_to_plain": round(ratio, 4) if ratio is not None else None,
            "seconds": round(statistics.median(r.seconds for r in side.rounds), 4),
            "completion_tokens": side.rounds[-1].completion_tokens,
            "steps": side.rounds[-1].engine.get("steps", 0.0),
            "ms_per_step": {part: round(side.ms_per_step(part), 4) for part in BENCH_PARTS},
            "decode": decode.as_dict() if decode is not None else None,
            "run_floor_share": round(share, 4) if share is not None else None,
            "decoded_alone": side.alone is not None,
            "trace": self._trace(side, decode),
            "idle": {name: round(share, 4) for name, share in side.idle._asdict().items()} if side.idle else None,
            "spec": {
                **side.spec.as_dict(),
                "mean_accepted_length": round(side.spec.mean_accepted_length, 4),
                "acceptance_rate": round(side.spec.acceptance_rate, 4),
                "acceptance_per_pos": [round(rate, 4) for rate in side.spec.acceptance_per_pos],
            },
        }

    def run_floor_share(self, case: Case, side: Side) -> float | None:
        """Return the floor of a side's whole run over its time; None for rows of a file or without a cost model."""
        if case.shape is None:
            return None
        return side.run_floor_share(case.shape, self.machine, with_prompts=not self.skips_prompts)

    def _trace(self, side: Side, decode: DecodeFigures | None) -> dict[str, object] | None:
        traced = side.traced
        if traced is None or decode is None:
            return None
        floor = decode.attention_floor(self.machine)
        return {
            "steps": traced.num_steps,
            "ms": round(1e3 * traced.period, 4),
            "busy_ms": round(1e3 * traced.busy, 4),
            "idle_share": round(max(0.0, 1 - traced.busy / decode.period), 4),
            "attention_ms": round(1e3 * traced.attention, 4),
            "attention_floor_ms": round(1e3 * floor, 4) if floor is not None else None,
            "attention_floor_share": round(floor / traced.attention, 4) if floor and traced.attention else None,
        }
