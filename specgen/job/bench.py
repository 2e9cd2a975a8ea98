"""Plain against speculative decoding, in one run and on the same rows.

Knows how to time an engine fairly: the two configurations alternate, each round on a fresh engine (no prefix cache left
over, no two models in memory), start-up and a warm-up row excluded, medians over rounds. Prints nothing.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import EngineError, InputError, RowError
from specgen.job.job import Engine
from specgen.job.peer import PeerResult
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row, RowReader, no_rows, open_input
from specgen.recipe import Recipe
from specgen.stats import SpecStats, counted
from specgen.tokenizer import Tokenizer

MakeEngine = Callable[[Recipe], AbstractContextManager[Engine]]
# Seconds between two outputs after which a benchmark gives up.
_SILENCE_SECONDS = 300.0
_WARM_UP_TOKENS = 8
# Parts of a step, as the engine counts them; "graph" is a decode step that ran as one CUDA graph, with all its parts.
BENCH_PARTS = ("total", "graph", "target", "sampling", "draft")


@dataclass(frozen=True, slots=True)
class Round:
    """One timed pass over all rows.

    seconds: from the first row given to the last one ended. engine: what its counters gained meanwhile.
    """

    seconds: float
    completion_tokens: int
    spec: SpecStats
    engine: dict[str, float]
    token_ids: dict[int, list[int]] = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.completion_tokens / self.seconds

    def ms_per_step(self, part: str) -> float:
        """Milliseconds a step spent in `part`, one of `BENCH_PARTS`; "total" is the wall clock."""
        steps = self.engine.get("steps", 0.0)
        seconds = self.seconds if part == "total" else self.engine.get(f"{part}_seconds", 0.0)
        return 1e3 * seconds / steps if steps else 0.0


@dataclass(slots=True)
class Side:
    """All rounds of one configuration (K drafts a step); every figure is a median over them."""

    num_tokens: int
    rounds: list[Round] = field(default_factory=list)

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

    def as_dict(self) -> dict[str, object]:
        """Return the figures as plain JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "tokens_per_second_rounds": [round(r.tokens_per_second, 2) for r in self.rounds],
            "completion_tokens": self.rounds[-1].completion_tokens,
            "steps": self.rounds[-1].engine.get("steps", 0.0),
            "ms_per_step": {part: round(self.ms_per_step(part), 4) for part in BENCH_PARTS},
            "spec": {
                **self.spec.as_dict(),
                "acceptance_rate": round(self.spec.acceptance_rate, 4),
                "acceptance_per_pos": [round(rate, 4) for rate in self.spec.acceptance_per_pos],
            },
        }


@dataclass(slots=True)
class BenchResult:
    """What a benchmark measured."""

    rows: int
    prompt_tokens: int
    plain: Side
    speculative: Side
    peer: PeerResult | None = None

    @property
    def speedup(self) -> float:
        """Output tokens/s of the speculative side over the plain one."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def num_different_rows(self) -> int:
        """Rows whose token ids were not the same in every round of both sides; exactness says 0."""
        rounds = [*self.plain.rounds, *self.speculative.rounds]
        first = rounds[0].token_ids
        return sum(any(r.token_ids[row] != ids for r in rounds[1:]) for row, ids in first.items())

    @property
    def num_rows_like_peer(self) -> int:
        """Rows whose token ids are the peer's."""
        ours = list(self.speculative.rounds[-1].token_ids.values())
        theirs = self.peer.token_ids if self.peer is not None else []
        return sum(a == b for a, b in zip(ours, theirs, strict=False))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values: the content of `--json`."""
        return {
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "rounds": len(self.plain.rounds),
            "plain": self.plain.as_dict(),
            "speculative": self.speculative.as_dict(),
            "speedup": round(self.speedup, 4),
            "equal": self.num_different_rows == 0,
            "different_rows": self.num_different_rows,
            "peer": self.peer.as_dict() if self.peer is not None else None,
        }


def read_bench_rows(recipe: Recipe, num_rows: int) -> list[Row]:
    """Return the first `num_rows` rows of the recipe's input, or fewer if its limit says so.

    Raises: InputError if one of them is broken, or there is none.
    """
    path = str(recipe.input.path)
    rows: list[Row] = []
    limit = min(num_rows, recipe.input.limit or num_rows)
    with open_input(path) as stream:
        for row in RowReader(stream, where=path, id_column=recipe.input.id, limit=limit):
            if isinstance(row, BadRow):
                raise InputError(str(row.error), where=f"{path}:{row.line}")
            rows.append(row)
    if not rows:
        raise no_rows(path)
    return rows


def run_bench(
    recipe: Recipe,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    make_engine: MakeEngine,
    *,
    num_rounds: int = 3,
    on_round: Callable[[str], None] | None = None,
    run_peer: Callable[[list[list[int]]], PeerResult] | None = None,
) -> BenchResult:
    """Return the figures of `recipe` with and without its speculation, `num_rounds` rounds each, alternated.

    on_round: told what is about to run. run_peer: runs the prompts (token ids) elsewhere, last.

    Raises: InputError for a row that cannot be run, EngineError if a row failed.
    """
    assert rows and num_rounds > 0
    plain_recipe = replace(recipe, speculation=replace(recipe.speculation, num_tokens=0))
    plain, speculative = Side(0), Side(recipe.speculation.num_tokens)
    prompts: list[list[int]] = []
    for number in range(num_rounds):
        # Whoever comes second finds warmer caches and a hotter processor: take turns.
        order = [(plain, plain_recipe), (speculative, recipe)]
        for side, side_recipe in order if number % 2 == 0 else reversed(order):
            if on_round is not None:
                on_round(f"round {number + 1} of {num_rounds}, {counted(side.num_tokens, 'draft')} a step")
            with make_engine(side_recipe) as engine:
                requests = _requests(side_recipe, rows, tokenizer, engine)
                prompts = [request.prompt_token_ids for request in requests]
                side.rounds.append(_timed(engine, requests))
    peer = run_peer(prompts) if run_peer is not None else None
    return BenchResult(len(rows), sum(map(len, prompts)), plain, speculative, peer)


def _requests(recipe: Recipe, rows: Sequence[Row], tokenizer: Tokenizer, engine: Engine) -> list[EngineRequest]:
    builder = PromptBuilder(recipe, tokenizer, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size)
    requests = []
    for row in rows:
        try:
            prompt = builder.build(row)
        except RowError as error:
            raise InputError(str(error), where=f"{recipe.input.path}:{row.line}") from None
        requests.append(EngineRequest(row.index, prompt.token_ids, prompt.params, prompt.seed))
    return requests


def _timed(engine: Engine, requests: Sequence[EngineRequest]) -> Round:
    first = requests[0]
    # Backwards, so that the warm-up leaves no prefix for the real rows to find.
    warm_up = EngineRequest(
        max(request.request_id for request in requests) + 1,
        first.prompt_token_ids[::-1],
        replace(first.params, max_tokens=_WARM_UP_TOKENS),
        first.seed,
    )
    _drain(engine, [warm_up])
    before = _numbers(engine.engine_stats())
    started = time.perf_counter()
    token_ids, spec = _drain(engine, requests)
    seconds = time.perf_counter() - started
    gained = {name: value - before.get(name, 0.0) for name, value in _numbers(engine.engine_stats()).items()}
    return Round(seconds, sum(map(len, token_ids.values())), spec, gained, token_ids)


def _drain(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[int, list[int]], SpecStats]:
    """Run all requests to their end; returns their ids by request and the summed counts. Raises: EngineError."""
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
