"""Whether a recipe's rows give the same tokens, speculatively and in company, as another way of computing them.

Knows how to run the rows, to find each row's first difference from the other way (the engine without drafts, or
transformers in `verify_peer.py`), and to have it judged (`verdict.py`). Prints nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import InputError, RowError
from specgen.job.job import Engine
from specgen.job.passes import outputs_of
from specgen.job.plan import RowPlanner
from specgen.job.prompts import PromptBuilder, chat_template_of
from specgen.job.verdict import NOISE_FACTOR, ROUNDING_FACTOR, TOLERANCES, Difference, RunAt, SideAt, ended, judge
from specgen.job.workloads import FirstRows
from specgen.models.config import read_config, resolve_max_model_len
from specgen.recipe import Recipe
from specgen.stats import counted
from specgen.stops import stop_check_of
from specgen.tokenizer import Tokenizer, eos_token_ids
from specgen.worker.config import (
    WorkerConfig,
    is_exact,
    resolve_block_size,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_num_batched_tokens,
)
from specgen.worker.probe import PositionLogits, Probe


class VerifyRow(NamedTuple):
    """A row of the input, made ready. id: the row's own, or None. line: of the file."""

    id: str | int | None
    line: int
    request: EngineRequest

    @property
    def name(self) -> str:
        """What the row is called in messages."""
        return name_of_row(self.id, self.line)


class Answer(NamedTuple):
    """What a run gave a row. finish_reason and stop: as in `EngineOutput`."""

    token_ids: list[int]
    finish_reason: str
    stop: str | int | None = None

    @property
    def end(self) -> str:
        """How the row ended, for people."""
        return f"end of row ({self.finish_reason}{'' if self.stop is None else f': {self.stop}'})"


class Found(NamedTuple):
    """A row's first difference: where, what the other run gave, and what it gave from there on (`following`).

    `other.token_id` is None where a run ended. logits: the other run's there; None if the probe is to recompute them.
    """

    position: int
    other: SideAt
    following: list[int]
    logits: PositionLogits | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row: how many tokens the recipe's run gave, and the first difference, None if there is none."""

    id: str | int | None
    line: int
    num_tokens: int
    difference: Difference | None

    @property
    def name(self) -> str:
        """What the row is called in messages."""
        return name_of_row(self.id, self.line)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """All rows, in order. against: the name of the other run. dtype: of the arithmetic, by which the rule judged.

    dtype and tolerance are None if nothing had to be judged.
    """

    against: str
    num_spec_tokens: int
    rows: list[RowResult]
    dtype: str | None = None
    tolerance: float | None = None

    @property
    def num_near_ties(self) -> int:
        """Rows whose first difference is a near-tie."""
        return sum(row.difference is not None and row.difference.is_near_tie for row in self.rows)

    @property
    def num_real(self) -> int:
        """Rows whose first difference is no near-tie."""
        return sum(row.difference is not None and not row.difference.is_near_tie for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Output tokens of the recipe's run."""
        return sum(row.num_tokens for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values: the content of `--json`. A number that is not finite is null."""
        return {
            "against": self.against,
            "num_spec_tokens": self.num_spec_tokens,
            "dtype": self.dtype,
            "rows": len(self.rows),
            "tokens": self.num_tokens,
            "same": len(self.rows) - self.num_near_ties - self.num_real,
            "near_ties": self.num_near_ties,
            "real_differences": self.num_real,
            "rule": {
                "noise_factor": NOISE_FACTOR,
                "tolerance": self.tolerance,
                "most_noise": None if self.tolerance is None else ROUNDING_FACTOR * self.tolerance,
            },
            "results": [_plain(asdict(row)) for row in self.rows],
        }


class LogitsProbe(Protocol):
    """What recomputes logits: `specgen.worker.probe.Probe`, where the methods are described."""

    @property
    def dtype(self) -> torch.dtype:
        """See `Probe.dtype`."""
        ...

    def alone(self, request: EngineRequest, token_ids: Sequence[int]) -> PositionLogits:
        """See `Probe.alone`."""
        ...

    def verifying(
        self, request: EngineRequest, token_ids: Sequence[int], following: Sequence[int], wanted: int | None
    ) -> PositionLogits:
        """See `Probe.verifying`."""
        ...

    def close(self) -> None:
        """See `Probe.close`."""
        ...


MakeEngine = Callable[[Recipe], AbstractContextManager[Engine]]
# Given the most tokens that a row to look at has, prompt and output together.
MakeProbe = Callable[[int], LogitsProbe]
# Given the answers of the recipe's run: each row's first difference from the other way, or None.
FindDifferences = Callable[[Sequence[Answer]], list[Found | None]]


def name_of_row(row_id: str | int | None, line: int) -> str:
    """Return what a row is called in messages."""
    return f"of line {line}" if row_id is None else f"{row_id!r} (line {line})"


def prepare_rows(recipe: Recipe, folder: Path, first: FirstRows, tokenizer: Tokenizer) -> list[VerifyRow]:
    """Return the rows made ready for the model in `folder`, in order.

    Raises: InputError for a row that cannot be run, ModelError, RecipeError.
    """
    model = read_config(folder)
    limit = resolve_max_model_len(recipe.engine.max_model_len, model, recipe.origins.get("engine.max_model_len"))
    planner = RowPlanner(recipe, is_batch=first.is_batch)
    builder = PromptBuilder(
        recipe,
        tokenizer,
        max_model_len=limit,
        vocab_size=model.vocab_size,
        template=chat_template_of(recipe, folder, needed=first.is_batch or recipe.input.messages is not None),
        planner=planner,
        eos_token_ids=eos_token_ids(folder, tokenizer),
    )
    prepared: list[VerifyRow] = []
    for row in first.rows:
        try:
            plan = planner.plan(row)
            prompt = builder.build_planned(plan)
        except RowError as error:
            raise InputError(str(error), where=f"{recipe.input.path}:{row.line}") from None
        stops = stop_check_of(prompt.params, tokenizer)
        for sample in plan.samples:
            seed = plan.seed(builder.run_seed, sample)
            request = EngineRequest(len(prepared), prompt.token_ids, prompt.params, seed, stops)
            prepared.append(VerifyRow(row.id, row.line, request))
    return prepared


def new_probe(recipe: Recipe, folder: Path, num_tokens: int) -> Probe:
    """Return a probe of the recipe's model, with room for a row of `num_tokens`, prompt and output together.

    Raises: ModelError, RecipeError as when the engine is made.
    """
    model, device = read_config(folder), resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)
    num_spec, block_size = recipe.speculation.num_tokens, resolve_block_size(recipe.engine.block_size, device)
    most_tokens = num_tokens + num_spec + 1
    return Probe(
        WorkerConfig(
            folder=folder,
            model=model,
            device=device,
            dtype=dtype,
            max_num_seqs=1,
            max_num_batched_tokens=min(
                resolve_max_num_batched_tokens(recipe.engine.max_num_batched_tokens, device), most_tokens
            ),
            max_model_len=resolve_max_model_len(recipe.engine.max_model_len, model),
            block_size=block_size,
            num_blocks=2 + most_tokens // block_size,  # the null block is one of them
            memory_fraction=recipe.engine.memory_fraction,
            num_speculative_tokens=num_spec,
            cuda_graphs=False,
            keeps_float8=recipe.model.float8 == "keep",
            exact=is_exact(recipe.engine.exactness, device),
            kv_dtype=resolve_kv_dtype(recipe.model.kv_dtype, dtype, device),
        )
    )


def run_verify(
    recipe: Recipe,
    rows: Sequence[VerifyRow],
    make_engine: MakeEngine,
    make_probe: MakeProbe,
    find_differences: FindDifferences,
    *,
    against: str,
    text_of: Callable[[int], str],
    on_progress: Callable[[str], None],
) -> VerifyResult:
    """Return how the rows, run as the recipe says, compare with `find_differences`, called `against`.

    text_of: a token's text. on_progress: told what is about to be done.

    Raises: InputError if a row fails, EngineError if the engine does.
    """
    assert rows
    on_progress(f"{counted(len(rows), 'row')} as the recipe says, {_drafts(recipe)} a step")
    with make_engine(recipe) as engine:
        ours = run_rows(engine, rows, str(recipe.input.path))
    found = find_differences(ours)
    judged: list[Difference | None] = [None] * len(rows)
    lengths = [
        len(row.request.prompt_token_ids) + difference.position + 1 + len(difference.following)
        for row, difference in zip(rows, found, strict=True)
        if difference is not None
    ]
    dtype: torch.dtype | None = None
    if lengths:
        on_progress(f"computing the logits at {counted(len(lengths), 'first difference')}")
        with closing(make_probe(max(lengths))) as probe:
            dtype = probe.dtype
            for i, difference in enumerate(found):
                if difference is not None:
                    judged[i] = _judged(probe, rows[i].request, ours[i], difference, TOLERANCES[dtype], text_of)
    results = [RowResult(r.id, r.line, len(a.token_ids), d) for r, a, d in zip(rows, ours, judged, strict=True)]
    num_spec_tokens = recipe.speculation.num_tokens
    if dtype is None:
        return VerifyResult(against, num_spec_tokens, results)
    return VerifyResult(against, num_spec_tokens, results, str(dtype).removeprefix("torch."), TOLERANCES[dtype])


def _judged(
    probe: LogitsProbe,
    request: EngineRequest,
    ours: Answer,
    found: Found,
    tolerance: float,
    text_of: Callable[[int], str],
) -> Difference:
    position, other = found.position, found.other
    token_id = ours.token_ids[position] if position < len(ours.token_ids) else None
    if token_id is None or other.token_id is None:
        mine = SideAt("speculative", token_id, ours.end if token_id is None else text_of(token_id))
        theirs = other if other.token_id is None else replace(other, text=text_of(other.token_id))
        return ended(position, mine, theirs)
    before = [*request.prompt_token_ids, *ours.token_ids[:position]]
    our_logits = probe.verifying(request, before, found.following, token_id)
    other_logits = found.logits if found.logits is not None else probe.alone(request, before)
    return judge(
        position,
        RunAt("speculative", token_id, our_logits),
        RunAt(other.name, other.token_id, other_logits),
        request.params.temperature,
        tolerance,
        text_of,
    )


def plain_differences(
    recipe: Recipe,
    rows: Sequence[VerifyRow],
    make_engine: MakeEngine,
    ours: Sequence[Answer],
    *,
    on_progress: Callable[[str], None],
) -> list[Found | None]:
    """Return each row's first difference from the engine without drafts, one row at a time, without a prefix cache.

    Raises: InputError if a row fails, EngineError if the engine does.
    """
    plain = replace(
        recipe,
        speculation=replace(recipe.speculation, num_tokens=0),
        engine=replace(recipe.engine, max_num_seqs=1, enable_prefix_caching=False),
    )
    on_progress(f"{counted(len(rows), 'row')} plainly, one by one")
    with make_engine(plain) as engine:
        theirs = run_rows(engine, rows, str(recipe.input.path))
    return [_first_difference(a, b) for a, b in zip(ours, theirs, strict=True)]


def _first_difference(ours: Answer, other: Answer) -> Found | None:
    if ours == other:
        return None
    pairs = zip(ours.token_ids, other.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        position = min(len(ours.token_ids), len(other.token_ids))
    following = other.token_ids[position:]
    side = SideAt("plain", following[0], "") if following else SideAt("plain", None, other.end)
    return Found(position, side, following)


def run_rows(
    engine: Engine,
    rows: Sequence[VerifyRow],
    where: str,
    *,
    on_end: Callable[[EngineOutput], None] = lambda output: None,
) -> list[Answer]:
    """Return what the engine gives the rows, all of them handed over at once, in order.

    where: the input's name, for messages. on_end: given each row's last output. Raises: InputError if a row fails,
    EngineError if the engine does.
    """
    by_id = {row.request.request_id: row for row in rows}
    token_ids: dict[int, list[int]] = {request_id: [] for request_id in by_id}
    answers: dict[int, Answer] = {}
    waits = outputs_of(engine, [row.request for row in rows])
    while len(answers) < len(rows):
        for output in next(waits):
            row_ids = token_ids[output.request_id]
            row_ids.extend(output.new_token_ids)
            if output.finish_reason is None:
                continue
            if output.finish_reason not in ("stop", "length"):
                raise InputError(
                    f"the row failed: {output.error or output.finish_reason}",
                    where=f"{where}:{by_id[output.request_id].line}",
                )
            on_end(output)
            answers[output.request_id] = Answer(row_ids, output.finish_reason, output.stop)
    return [answers[row.request.request_id] for row in rows]


def _drafts(recipe: Recipe) -> str:
    return counted(recipe.speculation.num_tokens, "draft")


def _plain(value: Any) -> Any:
    """Return `value` with what JSON does not have, numbers that are not finite, as None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
