"""Decoding with several numbers of drafts, timed in one run and on the same rows.

Knows how to time an engine fairly. Rows of a file: the candidates alternate, each round on a fresh engine (no
prefix cache left over, no two models in memory). Shapes: prompts of random ids, all rounds and shapes of one
candidate on one engine, since building it anew takes long where the model is large; the prefix cache is off.
Start-up and a warm-up are excluded; figures are medians over rounds. Traces come last: a profiler that was used once
may slow what follows in the same process. Prints nothing.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from specgen.engine.request import EngineRequest
from specgen.job.bench_figures import NO_MACHINE, EngineStart, Machine, Shape
from specgen.job.bench_result import BenchResult, Case, Side
from specgen.job.passes import BenchEngine, drain, timed, traced, without_prompts
from specgen.job.peer import PeerResult
from specgen.job.trace import idle, read_trace, summarize, traced_steps
from specgen.job.workloads import Workload
from specgen.recipe import Recipe
from specgen.stats import counted
from specgen.worker.trace import StepTrace

_WARM_UP_TOKENS = 8
# Steps of all rows in a row, below which a pass is made that has nothing else.
_FEW_STEPS = 8


class Candidate(NamedTuple):
    """What is measured beside others: a recipe; is_headless: on the model as if it had no draft layers."""

    recipe: Recipe
    is_headless: bool = False

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.recipe.speculation.num_tokens

    def __str__(self) -> str:
        """As it is told while it runs."""
        head = ", a model without a draft head" if self.is_headless else ""
        return f"{counted(self.num_drafts, 'draft')} a step{head}"


MakeEngine = Callable[[Candidate], AbstractContextManager[BenchEngine]]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure: every candidate (they differ in K) over every workload.

    keep_engine: all rounds of a candidate on one engine, else a fresh one for each, in turns. full_warm_up: a whole
    pass, which meets every size of a batch; else a few tokens of one row. skips_prompts: prompts count as computed.
    traces: trace some steps of each candidate and workload, after everything that is timed; trace_path: and keep that.
    """

    candidates: Sequence[Candidate]
    workloads: Sequence[Workload]
    num_rounds: int = 3
    keep_engine: bool = False
    full_warm_up: bool = False
    skips_prompts: bool = False
    traces: bool = False
    trace_path: Path | None = None

    def trace_path_of(self, workload: Workload, candidate: Candidate) -> Path | None:
        """The file for a trace: the path itself, or where there are several, one beside it with shape and K."""
        path = self.trace_path
        if path is None or len(self.candidates) * len(self.workloads) == 1:
            return path
        shape = f"-{workload.shape}" if workload.shape is not None else ""
        head = "-headless" if candidate.is_headless else ""
        stem, dot, suffixes = path.name.partition(".")
        return path.with_name(f"{stem}{shape}-k{candidate.num_drafts}{head}{dot}{suffixes}")


def run_bench(
    plan: BenchPlan,
    make_engine: MakeEngine,
    *,
    machine: Machine = NO_MACHINE,
    on_note: Callable[[str], None] = lambda note: None,
    on_result: Callable[[BenchResult], None] = lambda result: None,
    run_peer: Callable[[list[list[int]]], PeerResult] | None = None,
) -> BenchResult:
    """Return the figures of every candidate of the plan over every workload.

    machine: for the floors. on_note: told what is about to run. on_result: given what is there so far, now and then,
    since a long benchmark may be cut short. run_peer: runs the prompts (token ids) elsewhere, last.

    Raises: InputError for a row that cannot be run, EngineError if a row failed.
    """
    assert plan.candidates and plan.workloads and plan.num_rounds > 0
    with tempfile.TemporaryDirectory() as scratch:
        bench = _Bench(plan, make_engine, machine, on_note, Path(scratch))
        if plan.keep_engine:
            for i in range(len(plan.candidates)):
                bench.run(i, range(plan.num_rounds))
                on_result(bench.result())
        else:
            for number in range(plan.num_rounds):
                # Whoever comes second finds warmer caches and a hotter processor: take turns.
                order = range(len(plan.candidates))
                for i in order if number % 2 == 0 else reversed(order):
                    bench.run(i, range(number, number + 1))
            on_result(bench.result())
        if plan.traces:
            for i in range(len(plan.candidates)):
                bench.trace_apart(i)
                on_result(bench.result())
    peer = run_peer(bench.prompts) if run_peer is not None else None
    return bench.result(peer)


class _Bench:
    """The passes of a plan, and what they gave."""

    def __init__(
        self,
        plan: BenchPlan,
        make_engine: MakeEngine,
        machine: Machine,
        on_note: Callable[[str], None],
        scratch: Path,
    ) -> None:
        self._plan = plan
        self._make_engine = make_engine
        self._machine = machine
        self._on_note = on_note
        self._scratch = scratch
        self._traced: set[int] = set()
        self._starts: dict[int, EngineStart] = {}
        self.prompts: list[list[int]] = []
        self._cases = [Case(workload.shape, 0, 0, []) for workload in plan.workloads]
        for case in self._cases:
            for recipe, is_headless in plan.candidates:
                exactness = recipe.engine.exactness
                case.sides.append(Side(recipe.speculation.num_tokens, exactness=exactness, is_headless=is_headless))

    def result(self, peer: PeerResult | None = None) -> BenchResult:
        """What is there so far."""
        cases = [replace(case, sides=[side for side in case.sides if side.rounds]) for case in self._cases]
        return BenchResult(
            [case for case in cases if case.sides],
            self._machine,
            is_synthetic=any(c.recipe.speculation.method == "synthetic" for c in self._plan.candidates),
            skips_prompts=self._plan.skips_prompts,
            starts=list(self._starts.values()),
            peer=peer,
        )

    def run(self, i: int, numbers: range) -> None:
        """Run the rounds `numbers` of candidate `i` over all workloads on one engine."""
        plan, candidate = self._plan, self._plan.candidates[i]
        if plan.keep_engine:
            self._on_note(f"starting the engine, {candidate}")
        with self._make_engine(candidate) as engine:
            first_seconds = 0.0
            tokens_per_step = engine.description["max_num_batched_tokens"]
            assert isinstance(tokens_per_step, int)
            for workload, case in zip(plan.workloads, self._cases, strict=True):
                case.sides[i].tokens_per_step = tokens_per_step
                requests = self._requests(workload, candidate, engine)
                self.prompts = [request.prompt_token_ids for request in requests]
                case.rows, case.prompt_tokens = len(requests), sum(map(len, self.prompts))
                started = time.perf_counter()
                self._warm_up(engine, requests)
                first_seconds += time.perf_counter() - started
                self._rounds(engine, requests, workload, case.sides[i], f"{candidate}{_named(workload)}", numbers)
            side = self._cases[0].sides[i]
            self._starts[i] = EngineStart.of(
                side.num_tokens, side.exactness, side.is_headless, engine.description, engine.start_up(), first_seconds
            )
            is_last = i == len(plan.candidates) - 1
            if plan.traces and plan.keep_engine and is_last:  # nothing is timed after it
                self._trace(i, engine)

    def _requests(self, workload: Workload, candidate: Candidate, engine: BenchEngine) -> list[EngineRequest]:
        requests = workload.requests(candidate.recipe, engine)
        return without_prompts(requests) if self._plan.skips_prompts else requests

    def _rounds(
        self,
        engine: BenchEngine,
        requests: Sequence[EngineRequest],
        workload: Workload,
        side: Side,
        name: str,
        numbers: range,
    ) -> None:
        """Run the rounds, and untimed passes for what they do not tell."""
        plan = self._plan
        self._warn_of_kv(engine, workload)
        for number in numbers:
            self._on_note(f"round {number + 1} of {plan.num_rounds}, {name}")
            side.rounds.append(timed(engine, requests))
        if plan.num_rounds - 1 in numbers:
            if workload.shape is not None and not side.has_steps_of(_at_once(engine, workload.shape), _FEW_STEPS):
                self._on_note(f"decoding alone, {name}: prompts and answers overlapped all the time")
                side.alone = timed(engine, without_prompts(requests))
            rows = side.steady_rows
            if rows is not None and not side.knows_parts:
                self._on_note(f"timing the parts of a step, {name}")
                engine.time_parts(True)
                side.parts = timed(engine, requests if workload.shape is None else without_prompts(requests)).decode
                engine.time_parts(False)
        if plan.keep_engine:  # what is known is told: a long benchmark may be cut short
            self._on_note(_summary(side, name))

    def _warn_of_kv(self, engine: BenchEngine, workload: Workload) -> None:
        there, shape = engine.description.get("kv_tokens"), workload.shape
        if shape is None or not isinstance(there, int):
            return
        at_once = _at_once(engine, shape)
        num_tokens = shape._replace(rows=at_once).num_tokens
        if num_tokens > there:
            what = f"{shape}, {counted(at_once, 'row')} at once,"
            self._on_note(f"{what} is {num_tokens:,} tokens and the KV pool holds {there:,}: rows will wait")

    def _warm_up(self, engine: BenchEngine, requests: Sequence[EngineRequest]) -> None:
        # Backwards, so that the warm-up leaves no prefix for the real rows to find.
        first_id = 1 + max(request.request_id for request in requests)
        backwards = [
            replace(request, request_id=first_id + i, prompt_token_ids=request.prompt_token_ids[::-1])
            for i, request in enumerate(requests)
        ]
        if self._plan.full_warm_up:
            drain(engine, backwards)
        else:
            first = backwards[0]
            params = replace(first.params, max_tokens=_WARM_UP_TOKENS, min_tokens=0)
            drain(engine, [replace(first, params=params)])

    def trace_apart(self, i: int) -> None:
        """Trace steps of candidate `i` on an engine of its own, unless that was done."""
        if i in self._traced:
            return
        self._on_note(f"starting the engine again for traces, {self._plan.candidates[i]}")
        with self._make_engine(self._plan.candidates[i]) as engine:
            self._trace(i, engine)

    def _trace(self, i: int, engine: BenchEngine) -> None:
        self._traced.add(i)
        candidate = self._plan.candidates[i]
        for number, (workload, case) in enumerate(zip(self._plan.workloads, self._cases, strict=True)):
            side, rows = case.sides[i], case.sides[i].steady_rows
            num_steps = StepTrace.steps_for(side.num_steady_steps)
            name = f"{candidate}{_named(workload)}"
            if rows is None or not num_steps:
                self._on_note(
                    f"no trace, {name}: too few steps of {counted(rows or 0, 'row')}; give more output tokens"
                )
                continue
            path = self._plan.trace_path_of(workload, candidate)
            self._on_note(f"tracing {num_steps} steps{f' into {path}' if path is not None else ''}, {name}")
            path = path or self._scratch / f"{i}-{number}.json"
            requests = self._requests(workload, candidate, engine)
            if workload.shape is not None:
                requests = without_prompts(requests)
            if traced(engine, requests, path, rows, num_steps):
                events = read_trace(path)
                side.idle, side.traced = idle(events), summarize(traced_steps(events))
            else:
                self._on_note(f"no trace, {name}: its rows did not decode together for long enough")


def _at_once(engine: BenchEngine, shape: Shape) -> int:
    """Rows of the shape that are worked on at once: of more than the engine takes, the others come after them."""
    most = engine.description["max_num_seqs"]
    assert isinstance(most, int)
    return min(shape.rows, most)


def _named(workload: Workload) -> str:
    return f", {workload.shape}" if workload.shape is not None else ""


def _summary(side: Side, name: str) -> str:
    decode = side.decode(0.0, NO_MACHINE)
    step = f", {1e3 * decode.period:.2f} ms a step of {counted(decode.rows, 'row')}" if decode is not None else ""
    return f"{side.tokens_per_second:,.0f} tokens/s{step} ({name})"
