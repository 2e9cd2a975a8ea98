"""The kernels of a decode step for several numbers of rows and lengths, on one engine.

Knows how to bring an engine into a steady decode: prompts of random ids that count as computed, and drafts that are
always refused, so that all rows stay together, one token a step, while every step does all of its work. Needs a device;
prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from specgen.engine.request import EngineRequest
from specgen.errors import EngineError
from specgen.job.bench import Candidate, MakeEngine
from specgen.job.bench_figures import Machine, Shape
from specgen.job.kernels import KernelTable, kernel_table
from specgen.job.passes import BenchEngine, timed, traced, without_prompts
from specgen.job.workloads import shape_workload
from specgen.recipe import Recipe

# Steps with all rows together: some before the trace, and those in it.
_STEPS = 48
_TRACED = 16


def profile_shape(rows: int, context: int) -> Shape:
    """Return the shape whose traced steps have `rows` rows and about `context` tokens a row."""
    return Shape(rows, max(1, context - _TRACED), _STEPS)


def in_lockstep(recipe: Recipe) -> Recipe:
    """Return the recipe with every draft refused."""
    rates = (0.0,) * max(1, recipe.speculation.num_tokens)
    return replace(recipe, speculation=replace(recipe.speculation, method="synthetic", acceptance=rates))


def run_profile(
    recipe: Recipe,
    shapes: Sequence[Shape],
    make_engine: MakeEngine,
    *,
    machine: Machine,
    folder: Path,
    on_note: Callable[[str], None] = lambda note: None,
    on_table: Callable[[list[KernelTable]], None] = lambda tables: None,
) -> list[KernelTable]:
    """Return one table a shape; the traces they were read from stay in `folder`.

    A shape that cannot be traced is told to `on_note` and left out. on_table: given what is there, after each.

    Raises: EngineError if no shape could be traced.
    """
    on_note("starting the engine")
    tables: list[KernelTable] = []
    problem = "there is no shape"
    with make_engine(Candidate(in_lockstep(recipe))) as engine:
        for shape in shapes:
            on_note(f"{shape.rows} rows of {shape.prompt_tokens + _TRACED} tokens")
            try:
                tables.append(_table(engine, recipe, shape, machine, folder))
            except EngineError as error:
                problem = str(error)
                on_note(f"no table: {problem}")
                continue
            on_table(tables)
    if not tables:
        raise EngineError(problem)
    return tables


def _table(engine: BenchEngine, recipe: Recipe, shape: Shape, machine: Machine, folder: Path) -> KernelTable:
    there = engine.description.get("kv_tokens")
    if isinstance(there, int) and shape.num_tokens > there:
        raise EngineError(f"{shape.rows} rows take {shape.num_tokens:,} tokens of KV, and there is room for {there:,}")
    num_drafts, context = recipe.speculation.num_tokens, float(shape.prompt_tokens + _TRACED)
    requests = without_prompts(shape_workload(shape).requests(recipe, engine))
    untraced = timed(engine, requests).decode.get(shape.rows)  # captures the graphs, too
    name = f"{shape.rows}x{shape.prompt_tokens + _TRACED}.json"
    replays, labelled = (folder / f"{kind}-{name}" for kind in ("replays", "labelled"))
    _trace(engine, requests, replays)
    engine.label_steps(True)
    try:
        _trace(engine, requests, labelled)
    finally:
        engine.label_steps(False)
    cost = machine.cost_model.decode(shape.rows, context, num_drafts) if machine.cost_model is not None else None
    period = untraced.median_period if untraced is not None and untraced.periods else None
    return kernel_table(replays, labelled, shape.rows, context, num_drafts, cost, period)


def _trace(engine: BenchEngine, requests: Sequence[EngineRequest], path: Path) -> None:
    rows = len(requests)
    if not traced(engine, requests, path, rows, _TRACED):
        raise EngineError(
            f"no {rows} rows decoded together for long enough to be traced: are there KV blocks for them?"
        )
