"""Decoding with several numbers of drafts, timed in one run and on the same rows.

Knows how to time an engine fairly. Rows of a file: the configurations alternate, each round on a fresh engine (no
prefix cache left over, no two models in memory). Shapes: prompts of random ids, all rounds and shapes of one
configuration on one engine, since building it anew takes long where the model is large; the prefix cache is off.
Start-up and a warm-up are excluded; figures are medians over rounds. Prints nothing.
"""

import itertools
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import EngineError, InputError, RecipeError, RowError
from specgen.job.bench_result import NO_MACHINE, BenchResult, Case, Machine, Round, Shape, Side
from specgen.job.inputs import Input
from specgen.job.job import Engine
from specgen.job.peer import PeerResult
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row, no_rows
from specgen.job.templates import ChatTemplate
from specgen.job.trace import idle, read_trace
from specgen.recipe import Recipe
from specgen.seeds import row_seed
from specgen.stats import SpecStats, counted
from specgen.stops import stop_check_of
from specgen.tokenizer import Tokenizer
from specgen.worker.timing import DecodeTimes
from specgen.worker.trace import StepTrace
from specgen.worker.worker import resolve_device, resolve_max_num_batched_tokens

# Seconds between two outputs after which a benchmark gives up.
_SILENCE_SECONDS = 300.0
_WARM_UP_TOKENS = 8
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


class BenchEngine(Engine, Protocol):
    """What a benchmark needs of an engine beside what a job does."""

    description: dict[str, object]

    def decode_times(self) -> Mapping[int, DecodeTimes]:
        """Return the times of the decode-only steps so far, by number of rows."""

    def time_parts(self, wanted: bool) -> None:
        """Tell the parts of steps that run as one launch from now on, or no longer."""

    def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
        """Write a trace of `num_steps` of the next steady decode steps of `num_rows` rows."""

    def label_steps(self, wanted: bool) -> None:
        """Run steps one operation at a time from now on, in ranges that a trace shows, or as before."""


MakeEngine = Callable[[Recipe], AbstractContextManager[BenchEngine]]


class Workload(NamedTuple):
    """The requests of one pass; `shape` is None for the rows of a file."""

    shape: Shape | None
    requests: Callable[[Recipe, BenchEngine], list[EngineRequest]]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure: every recipe (they differ in K) over every workload.

    keep_engine: all rounds of a recipe on one engine, else a fresh one for each, in turns. full_warm_up: a whole pass,
    which meets every size of a batch; else a few tokens of one row.
    """

    recipes: Sequence[Recipe]
    workloads: Sequence[Workload]
    num_rounds: int = 3
    keep_engine: bool = False
    full_warm_up: bool = False
    trace_path: Path | None = None

    def trace_path_of(self, workload: Workload, recipe: Recipe) -> Path | None:
        """The file for a trace: the path itself, or where there are several, one beside it with shape and K."""
        path = self.trace_path
        if path is None or len(self.recipes) * len(self.workloads) == 1:
            return path
        shape = f"-{workload.shape}" if workload.shape is not None else ""
        stem, dot, suffixes = path.name.partition(".")
        return path.with_name(f"{stem}{shape}-k{recipe.speculation.num_tokens}{dot}{suffixes}")


def parse_shapes(texts: Sequence[str]) -> list[Shape]:
    """Return the shapes in texts like "1x512x256,32x512x256".

    Raises: RecipeError for one that is no shape.
    """
    shapes = []
    for text in ",".join(texts).split(","):
        match = _SHAPE.fullmatch(text.strip())
        if match is None or min(map(int, match.groups())) < 1:
            raise RecipeError(
                f"{text!r} is no shape", where="--shape", hint="ROWSxINxOUT, like 32x512x256: rows, prompt, answer"
            )
        shapes.append(Shape(*map(int, match.groups())))
    return shapes


def shape_workload(shape: Shape) -> Workload:
    """Return rows of random token ids, each answered to its full length."""

    def requests(recipe: Recipe, engine: BenchEngine) -> list[EngineRequest]:
        ids = random.Random(str(shape))
        run_seed = recipe.sampling.seed or 0
        params = replace(recipe.sampling, max_tokens=shape.output_tokens, ignore_eos=True, stop_token_ids=(), stop=())
        return [
            EngineRequest(
                i,
                [ids.randrange(engine.vocab_size) for _ in range(shape.prompt_tokens)],
                params,
                row_seed(run_seed, f"bench:{i}"),
            )
            for i in range(shape.rows)
        ]

    return Workload(shape, requests)


def rows_workload(rows: Sequence[Row], tokenizer: Tokenizer, template: ChatTemplate | None = None) -> Workload:
    """Return the rows of a file, as a run would prompt them; `template` is for chats."""

    def requests(recipe: Recipe, engine: BenchEngine) -> list[EngineRequest]:
        builder = PromptBuilder(
            recipe,
            tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            template=template,
        )
        found = []
        for row in rows:
            try:
                prompt = builder.build(row)
            except RowError as error:
                raise InputError(str(error), where=f"{recipe.input.name}:{row.line}") from None
            stops = stop_check_of(prompt.params, tokenizer)
            found.append(EngineRequest(row.index, prompt.token_ids, prompt.params, prompt.seed, stops))
        return found

    return Workload(None, requests)


def read_bench_rows(recipe: Recipe, num_rows: int) -> list[Row]:
    """Return the first `num_rows` rows of the recipe's input, or fewer if its limit says so.

    Raises: InputError if one of them is broken, or there is none.
    """
    source = Input(recipe.input)
    rows: list[Row] = []
    for row in itertools.islice(source.rows(unique_ids=True), num_rows):
        if isinstance(row, BadRow):
            raise InputError(str(row.error), where=f"{source.name}:{row.line}")
        rows.append(row)
    if not rows:
        raise no_rows(source.name)
    return rows


def run_bench(
    plan: BenchPlan,
    make_engine: MakeEngine,
    *,
    machine: Machine = NO_MACHINE,
    on_note: Callable[[str], None] = lambda note: None,
    run_peer: Callable[[list[list[int]]], PeerResult] | None = None,
) -> BenchResult:
    """Return the figures of every recipe of the plan over every workload.

    machine: for the floors. on_note: told what is about to run. run_peer: runs the prompts (token ids) elsewhere, last.

    Raises: InputError for a row that cannot be run, EngineError if a row failed.
    """
    assert plan.recipes and plan.workloads and plan.num_rounds > 0
    bench = _Bench(plan, make_engine, on_note)
    if plan.keep_engine:
        for i in range(len(plan.recipes)):
            bench.run(i, range(plan.num_rounds))
    else:
        for number in range(plan.num_rounds):
            # Whoever comes second finds warmer caches and a hotter processor: take turns.
            order = range(len(plan.recipes))
            for i in order if number % 2 == 0 else reversed(order):
                bench.run(i, range(number, number + 1))
    is_synthetic = any(recipe.speculation.method == "synthetic" for recipe in plan.recipes)
    peer = run_peer(bench.prompts) if run_peer is not None else None
    return BenchResult(bench.cases, machine, is_synthetic, peer)


def step_tokens(recipe: Recipe) -> int:
    """Return the most tokens of a step of the recipe's engine."""
    return resolve_max_num_batched_tokens(recipe.engine.max_num_batched_tokens, resolve_device(recipe.model.device))


class _Bench:
    """The passes of a plan, and what they gave."""

    def __init__(self, plan: BenchPlan, make_engine: MakeEngine, on_note: Callable[[str], None]) -> None:
        self._plan = plan
        self._make_engine = make_engine
        self._on_note = on_note
        self.prompts: list[list[int]] = []
        self.cases = [Case(workload.shape, 0, 0, []) for workload in plan.workloads]
        for case in self.cases:
            for recipe in plan.recipes:
                case.sides.append(Side(recipe.speculation.num_tokens, step_tokens(recipe)))

    def run(self, recipe_idx: int, numbers: range) -> None:
        """Run the rounds `numbers` of one recipe over all workloads on one engine."""
        recipe = self._plan.recipes[recipe_idx]
        drafts = f"{counted(recipe.speculation.num_tokens, 'draft')} a step"
        if self._plan.keep_engine:
            self._on_note(f"starting the engine, {drafts}")
        with self._make_engine(recipe) as engine:
            for workload, case in zip(self._plan.workloads, self.cases, strict=True):
                side = case.sides[recipe_idx]
                requests = workload.requests(recipe, engine)
                self.prompts = [request.prompt_token_ids for request in requests]
                case.rows, case.prompt_tokens = len(requests), sum(map(len, self.prompts))
                shape = f", {workload.shape}" if workload.shape is not None else ""
                self._warm_up(engine, requests)
                for number in numbers:
                    self._on_note(f"round {number + 1} of {self._plan.num_rounds}, {drafts}{shape}")
                    side.rounds.append(_timed(engine, requests))
                if self._plan.keep_engine:  # what is known is told: a long benchmark may be cut short
                    self._on_note(_summary(side, drafts, shape))
                if self._plan.num_rounds - 1 in numbers:
                    self._look_inside(engine, requests, side, self._plan.trace_path_of(workload, recipe))

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

    def _look_inside(
        self, engine: BenchEngine, requests: Sequence[EngineRequest], side: Side, trace_path: Path | None
    ) -> None:
        """Run further passes, which are not timed: for the parts of a step that is one launch, and for a trace."""
        rows = side.steady_rows
        if rows is None:
            return
        if not side.rounds[-1].decode[rows].timed_steps:
            self._on_note("timing the parts of a step")
            engine.time_parts(True)
            side.parts = _timed(engine, requests).decode
            engine.time_parts(False)
        if trace_path is not None:
            num_steps = StepTrace.steps_for(side.rounds[-1].decode[rows].periods)
            if not num_steps:
                self._on_note(f"no trace: too few steps of {counted(rows, 'row')}; give more output tokens")
                return
            self._on_note(f"tracing {num_steps} steps into {trace_path}")
            engine.trace_steps(trace_path, rows, num_steps)
            drain(engine, requests)
            side.idle = idle(read_trace(trace_path))


def _summary(side: Side, drafts: str, shape: str) -> str:
    decode = side.decode(0.0, NO_MACHINE)
    step = f", {1e3 * decode.period:.2f} ms a step of {counted(decode.rows, 'row')}" if decode is not None else ""
    return f"{side.tokens_per_second:,.0f} tokens/s{step} ({drafts}{shape})"


def _timed(engine: BenchEngine, requests: Sequence[EngineRequest]) -> Round:
    before, decode_before = _numbers(engine.engine_stats()), engine.decode_times()
    started = time.perf_counter()
    token_ids, spec = drain(engine, requests)
    seconds = time.perf_counter() - started
    gained = {name: value - before.get(name, 0.0) for name, value in _numbers(engine.engine_stats()).items()}
    decode = {
        rows: new
        for rows, times in engine.decode_times().items()
        if (new := times.since(decode_before.get(rows, DecodeTimes()))).steps
    }
    return Round(seconds, sum(map(len, token_ids.values())), spec, gained, token_ids, decode)


def drain(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[int, list[int]], SpecStats]:
    """Run all requests to their end; return their ids by request and the summed counts. Raises: EngineError."""
    token_ids: dict[int, list[int]] = {request.request_id: [] for request in requests}
    spec = SpecStats()
    for request in requests:
        engine.add_request(request)
    num_left = len(requests)
    last_output = time.perf_counter()
    while num_left:
        outputs: list[EngineOutput] = engine.get_outputs(timeout=1.0)
        now = time.perf_counter()
        if outputs:
            last_output = now
        elif now - last_output > _SILENCE_SECONDS:
            raise EngineError(f"the engine gave nothing for {_SILENCE_SECONDS:.0f} seconds")
        for output in outputs:
            token_ids[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is None:
                continue
            num_left -= 1
            if output.finish_reason not in ("stop", "length"):
                raise EngineError(f"row {output.request_id} failed: {output.error}")
            if output.stats is not None:
                spec.add(output.stats)
    return token_ids, spec


def _numbers(stats: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in stats.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
