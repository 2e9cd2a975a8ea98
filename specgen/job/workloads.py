"""What a benchmark runs: prompts of random ids in a shape, or the rows of a file. Knows requests; runs nothing."""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from specgen.engine.request import EngineRequest
from specgen.errors import InputError, RecipeError, RowError
from specgen.job.bench_figures import Shape
from specgen.job.inputs import Input
from specgen.job.passes import BenchEngine
from specgen.job.plan import RowPlanner
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row, no_rows
from specgen.job.templates import ChatTemplate
from specgen.recipe import Recipe
from specgen.seeds import row_seed
from specgen.stops import stop_check_of
from specgen.tokenizer import Tokenizer

_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


class FirstRows(NamedTuple):
    """The first rows of a file; is_batch: they are requests of an OpenAI batch file."""

    rows: list[Row]
    is_batch: bool


class Workload(NamedTuple):
    """The requests of one pass; `shape` is None for the rows of a file."""

    shape: Shape | None
    requests: Callable[[Recipe, BenchEngine], list[EngineRequest]]


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
        """Return the same requests in each pass, with ids that the engine's model has."""
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


def rows_workload(first: FirstRows, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> Workload:
    """Return the rows of a file, as a run would prompt them; `template` is for chats."""

    def requests(recipe: Recipe, engine: BenchEngine) -> list[EngineRequest]:
        """Return the rows' requests. Raises: InputError for a row that cannot be run."""
        builder = PromptBuilder(
            recipe,
            tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            template=template,
            planner=RowPlanner(recipe, is_batch=first.is_batch),
        )
        found = []
        for row in first.rows:
            try:
                prompt = builder.build(row)
            except RowError as error:
                raise InputError(str(error), where=f"{recipe.input.name}:{row.line}") from None
            stops = stop_check_of(prompt.params, tokenizer)
            found.append(EngineRequest(row.index, prompt.token_ids, prompt.params, prompt.seed, stops))
        return found

    return Workload(None, requests)


def read_bench_rows(recipe: Recipe, num_rows: int) -> FirstRows:
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
    return FirstRows(rows, source.is_batch)
