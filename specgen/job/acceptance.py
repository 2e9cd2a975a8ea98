"""How many drafts are accepted, by the way they are drawn and judged, on the same rows.

Knows the ways, how to run the rows under each, and the counts that come of it. Prints nothing.

    shared      drafts with the target's own noise, judged strictly: what `speculation.method: exact` does
    unprocessed the same, but penalties, filters and rules do not act on the drafts
    argmax      the draft layer's likeliest tokens, judged strictly
    ratio       drafts with noise of their own, judged by the ratio of the distributions: `speculation.method: ratio`
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from specgen.engine.request import EngineOutput
from specgen.job.job import Engine
from specgen.job.verify import VerifyRow, run_rows
from specgen.recipe import Recipe
from specgen.sampling_params import SamplingParams
from specgen.stats import RunStats, SpecStats, counted
from specgen.worker.sampler import Noise
from specgen.worker.speculator import Drafting


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draw and to judge drafts. method: `speculation.method`."""

    name: str
    method: str
    drafting: Drafting


SHARED = Way("shared", "exact", Drafting())
UNPROCESSED = Way("unprocessed", "exact", Drafting(processors=False))
ARGMAX = Way("argmax", "exact", Drafting(noise=Noise.NONE))
RATIO = Way("ratio", "ratio", Drafting())

# Makes an engine for a recipe whose drafts are drawn so.
MakeEngine = Callable[[Recipe, Drafting], AbstractContextManager[Engine]]
# Prepares the rows under a recipe.
MakeRows = Callable[[Recipe], Sequence[VerifyRow]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The counts of one way at one temperature. seconds: of the rows, from the first handed over to the last ended.

    temperature: None if the rows keep theirs.
    """

    way: str
    temperature: float | None
    rows: int
    seconds: float
    stats: RunStats

    @property
    def spec(self) -> SpecStats:
        """The counts, summed over the rows."""
        return self.stats.spec

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values."""
        return {
            "way": self.way,
            "temperature": self.temperature,
            "rows": self.rows,
            "tokens": self.spec.emitted,
            "seconds": round(self.seconds, 3),
            **self.spec.as_dict(),
            "mean_accepted_length_macro": round(self.stats.macro_mean_accepted_length, 4),
            "acceptance_rate": round(self.spec.acceptance_rate, 4),
            "acceptance_per_pos": [round(rate, 4) for rate in self.spec.acceptance_per_pos],
        }


def ways_for(rows: Sequence[VerifyRow]) -> list[Way]:
    """Return the ways that can differ for these rows."""
    has_processors = any(map(_has_processors, (row.request.params for row in rows)))
    return [SHARED, *([UNPROCESSED] if has_processors else []), ARGMAX, RATIO]


# What else than the temperature can change which token a row takes; the first group only above temperature 0.
_FILTERS = ("top_k", "top_p", "min_p", "typical_p")
_RULES = ("logit_bias", "allowed_token_ids", "bad_words_ids", "no_repeat_ngram_size", "min_tokens")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def _has_processors(params: SamplingParams) -> bool:
    neutral = SamplingParams()
    names = (*_RULES, *_PENALTIES, *(_FILTERS if params.temperature > 0 else ()))
    return any(getattr(params, name) != getattr(neutral, name) for name in names)


def measure_acceptance(
    recipe: Recipe,
    temperatures: Sequence[float | None],
    make_rows: MakeRows,
    make_engine: MakeEngine,
    *,
    on_progress: Callable[[str], None],
) -> list[Acceptance]:
    """Return the counts of every way at every temperature, in order; None leaves each row its own.

    Raises: InputError if a row fails, EngineError if the engine does.
    """
    found = []
    for temperature in temperatures:
        warm = recipe if temperature is None else _at(recipe, temperature)
        rows = make_rows(warm)
        if temperature is not None:  # rows that bring one of their own as well
            rows = [_row_at(row, temperature) for row in rows]
        for way in ways_for(rows):
            shown = "the rows' own temperature" if temperature is None else f"temperature {temperature:g}"
            on_progress(f"{counted(len(rows), 'row')} at {shown}: {way.name}")
            side = replace(warm, speculation=replace(warm.speculation, method=way.method, acceptance=None))
            found.append(_measure(side, way, temperature, rows, make_engine))
    return found


def _measure(
    recipe: Recipe, way: Way, temperature: float | None, rows: Sequence[VerifyRow], make_engine: MakeEngine
) -> Acceptance:
    stats = RunStats()

    def count(output: EngineOutput) -> None:
        stats.spec.add(output.stats or SpecStats())
        if output.stats is not None and output.stats.steps:
            stats.sum_mean_accepted += output.stats.mean_accepted_length
            stats.num_means += 1

    with make_engine(recipe, way.drafting) as engine:
        started = time.perf_counter()
        run_rows(engine, rows, recipe.input.name, on_end=count)
        seconds = time.perf_counter() - started
    return Acceptance(way.name, temperature, len(rows), seconds, stats)


def _at(recipe: Recipe, temperature: float) -> Recipe:
    return replace(recipe, sampling=replace(recipe.sampling, temperature=temperature))


def _row_at(row: VerifyRow, temperature: float) -> VerifyRow:
    params = replace(row.request.params, temperature=temperature)
    return row._replace(request=replace(row.request, params=params))
