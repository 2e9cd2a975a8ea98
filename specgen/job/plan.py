"""From a row to what is asked of it: its key, its content, its parameters; or the reason why it cannot be run.

Knows columns, sampling overrides and keys; needs no tokenizer, so it is quick. What is too long, or no text, is found
out later (`prompts.py`).

A row's key is its id, or the hash of its content with how many rows of that content came before; for a row without
either, the hash of its bytes. It decides the row's seed, what a resumed run skips and which shard has the row.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specgen import checks, seeds
from specgen.errors import RowError, SpecgenError
from specgen.job import openai_batch
from specgen.job.contents import Content, checked_messages, checked_prompt, content_digest
from specgen.job.digest_map import DigestMap
from specgen.job.openai_batch import BatchRequest
from specgen.job.readers import BadRow, Row, parse_json
from specgen.job.templates import ColumnTemplate
from specgen.recipe import Recipe
from specgen.sampling_params import PARAM_NAMES, SamplingParams, merged

OVERRIDES = "sampling"
# A column alike to a parameter by this much is taken for a slip, not for the user's own data.
_SLIP_RATIO = 0.9


@dataclass(slots=True)
class Plan:
    """A row and what is asked of it. Either `error` is set, or content, digest and params are.

    samples: those that are to be run. has_own_seed: whether the row brings its seed, which then goes with the content.
    """

    row: Row | BadRow
    key: str
    error: RowError | None = None
    content: Content | None = None
    digest: str = ""
    params: SamplingParams | None = None
    has_own_seed: bool = False
    samples: tuple[int, ...] = (0,)
    batch: BatchRequest | None = None

    def seed(self, run_seed: int, sample: int) -> int:
        """Return the noise seed of a sample."""
        assert self.params is not None
        if self.has_own_seed:
            assert self.params.seed is not None
            return seeds.own_seed(self.params.seed, self.digest, sample)
        return seeds.row_seed(run_seed, self.key, sample)


class RowPlanner:
    """Plans rows, in input order (the order decides which copy of a repeated prompt is which).

    is_batch: rows are requests of an OpenAI batch file. Remembers every different prompt of a row without an id, in at
    most 48 bytes each (`DigestMap`).
    """

    def __init__(self, recipe: Recipe, *, is_batch: bool = False) -> None:
        """Raises: RecipeError if `input.template` is no template."""
        section = recipe.input
        self._is_batch = is_batch
        self._defaults = recipe.sampling
        self._prompt_column = section.messages or section.prompt
        self._is_chat = section.messages is not None
        self._template = ColumnTemplate(section.template) if section.template is not None else None
        self._own_columns = set(section.keep) | (set() if is_batch else {self._prompt_column, section.id, OVERRIDES})
        self._has_overrides = OVERRIDES not in section.keep
        self._keeps_duplicates = section.duplicate_ids == "keep"
        self._occurrences = DigestMap()

    def plans(self, rows: Iterable[Row | BadRow]) -> Iterator[Plan]:
        """Yield the plan of each row."""
        return map(self.plan, rows)

    def plan(self, row: Row | BadRow) -> Plan:
        """Return the row's plan; its error has a code: missing_prompt, bad_prompt, bad_messages, bad_sampling, …"""
        if isinstance(row, BadRow):
            return Plan(row, self._key_of(row, ""), row.error)
        content, digest, batch = None, "", None
        try:
            if self._is_batch:
                batch = openai_batch.request_of(row.data)
                content = batch.content
            else:
                content = self._content_of(row.data)
            digest = content_digest(content)
            key = self._key_of(row, digest)
        except RowError as error:
            return Plan(row, self._key_of(row, ""), error)
        try:
            self._refuse_slips(row.data)
            overrides = batch.overrides if batch is not None else self._overrides_of(row.data)
            params = merged(self._defaults, overrides, where=None if batch is not None else OVERRIDES)
        except SpecgenError as error:
            return Plan(row, key, RowError(str(error), code=error.code), batch=batch)
        has_own_seed = overrides.get("seed") is not None
        samples = tuple(range(params.n))
        return Plan(row, key, None, content, digest, params, has_own_seed, samples, batch)

    def _content_of(self, data: Mapping[str, Any]) -> Content:
        if self._template is not None:
            return self._template.render(data)
        name = self._prompt_column
        if name not in data:
            close = checks.nearest(name, data)
            hint = f"did you mean {close!r}?" if close else f"columns: {', '.join(map(str, list(data)[:10])) or 'none'}"
            if not self._is_chat and isinstance(data.get("messages"), list):
                hint = "for chats: input.messages=messages"
            raise RowError(f"the row has no column {name!r}", hint=hint, code="missing_prompt")
        if self._is_chat:
            return checked_messages(_parsed(data[name], name, code="bad_messages"), name)
        return checked_prompt(data[name], name)

    def _refuse_slips(self, data: Mapping[str, Any]) -> None:
        """Raises: RowError if a column looks like a parameter that would be ignored in silence."""
        for column in data:
            slip = None if column in self._own_columns else _slip_for(column)
            if slip is None:
                continue
            home = "body" if self._is_batch else OVERRIDES
            what = f"{OVERRIDES!r}: its content goes" if slip == OVERRIDES else f"the parameter {slip!r}, which goes"
            raise RowError(
                f"column {column!r} looks like {what} under {home!r}",
                hint="if it is your own, name it under input.keep",
                code="bad_sampling",
            )

    def _overrides_of(self, data: Mapping[str, Any]) -> Mapping[str, object]:
        overrides = _parsed(data.get(OVERRIDES), OVERRIDES, code="bad_sampling") if self._has_overrides else None
        if overrides is None:
            return {}
        if not isinstance(overrides, dict):
            raise RowError(f"{OVERRIDES} must be an object, not {checks.shown(overrides)}", code="bad_sampling")
        return overrides

    def _key_of(self, row: Row | BadRow, digest: str) -> str:
        has_id = row.id is not None and (isinstance(row, Row) or row.error.code not in ("duplicate_id", "bad_id"))
        if has_id:
            assert row.id is not None
            key = seeds.row_key_of_id(row.id)
            if not self._keeps_duplicates:
                return key
            number = self._count(key)
            return key if number == 0 else f"again:{number}:{key}"  # an id of its own may have any end
        if not digest:
            raw = getattr(row, "raw", b"") or json.dumps(row.data, sort_keys=True, default=str).encode()
            digest = "row:" + hashlib.blake2b(raw, digest_size=16).hexdigest()
            return f"{digest}:{self._count(digest)}"
        return seeds.row_key_of_content(digest, self._occurrences.count(bytes.fromhex(digest[:16])))

    def _count(self, name: str) -> int:
        return self._occurrences.count(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _parsed(value: Any, name: str, *, code: str) -> Any:
    """Return an object or a list that a table's cell holds as JSON; everything else as it is. Raises: RowError."""
    is_json = isinstance(value, str) and value[:1] in ("{", "[")
    return parse_json(value, name, code=code) if is_json else value


@functools.lru_cache(maxsize=4096)
def _slip_for(column: str) -> str | None:
    """Return the sampling parameter (or "sampling") that a column's name is, or nearly is."""
    plain = {name.replace("_", ""): name for name in (*PARAM_NAMES, OVERRIDES, "sampling_params")}
    close = checks.nearest(column.lower().replace("_", "").replace("-", ""), plain, cutoff=_SLIP_RATIO)
    if close is None:
        return None
    return OVERRIDES if plain[close] == "sampling_params" else plain[close]
