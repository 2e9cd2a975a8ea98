"""The kernels of a decode step for several numbers of rows, on one engine.

Knows how to bring an engine into a steady decode: prompts of random ids, and drafts that are always refused, so that
all rows stay together, one token a step, while every step does all of its work. Needs a device; prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from specgen.engine.request import EngineRequest
from specgen.errors import EngineError
from specgen.job.bench import BenchEngine, MakeEngine, drain, shape_workload, step_tokens
from specgen.job.bench_result import Machine, Shape
from specgen.job.kernels import KernelTable, kernel_table
from specgen.recipe import Recipe

# Steps with all rows together: some before the trace, and those in it.
_STEPS = 48
_TRACED = 16


def profile_shape(rows: int, context: int) -> Shape:
    """Return the shape whose decode steps have `rows` rows and about `context` tokens a row.

    While the last prompts are read, the first rows decode already: their answers are longer by that many steps.
    """
    return Shape(rows, max(1, context - _STEPS // 2), _STEPS + rows * context // 1024)


def _context(recipe: Recipe, shape: Shape) -> float:
    """Tokens that a row holds in the middle of the traced steps, as a mean over rows."""
    budget = step_tokens(recipe) - shape.rows * (1 + recipe.speculation.num_tokens) / 2
    prefill_steps = shape.rows * shape.prompt_tokens / max(1.0, budget)
    return shape.prompt_tokens + prefill_steps / 2 + _TRACED


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
) -> list[KernelTable]:
    """Return one table a shape; the traces they were read from stay in `folder`.

    Raises: EngineError if a step could not be traced.
    """
    on_note("starting the engine")
    tables = []
    num_drafts = recipe.speculation.num_tokens
    with make_engine(in_lockstep(recipe)) as engine:
        for shape in shapes:
            on_note(f"{shape.rows} rows")
            requests = shape_workload(shape).requests(recipe, engine)
            drain(engine, requests)  # captures the graphs
            replays, labelled = (folder / f"{kind}-{shape.rows}.json" for kind in ("replays", "labelled"))
            _trace(engine, requests, replays)
            engine.label_steps(True)
            _trace(engine, requests, labelled)
            engine.label_steps(False)
            cost = None
            if machine.cost_model is not None:
                cost = machine.cost_model.decode(shape.rows, _context(recipe, shape), num_drafts)
            tables.append(kernel_table(replays, labelled, shape.rows, num_drafts, cost))
    return tables


def _trace(engine: BenchEngine, requests: Sequence[EngineRequest], path: Path) -> None:
    rows = len(requests)
    engine.trace_steps(path, rows, _TRACED)
    drain(engine, requests)
    if not path.is_file():
        raise EngineError(
            f"no {rows} rows decoded together for long enough to be traced: are there KV blocks for them?"
        )
