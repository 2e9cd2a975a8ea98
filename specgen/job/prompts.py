"""From a row to what the engine is asked for, or to the reason why not.

Knows columns, sampling overrides, the length limit and which seed a row gets. Does not know files or engines.

The limit: prompt and answer together have at most `max_model_len` tokens. A prompt of max_model_len - 1 tokens gets one
token; a longer one is an error, never cut. An empty prompt is an error too; a prompt that is only the BOS text is run.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgen import checks, seeds
from specgen.errors import RowError, SpecgenError
from specgen.job.digest_map import DigestMap
from specgen.job.readers import Row
from specgen.recipe import Recipe
from specgen.sampling_params import PARAM_NAMES, SamplingParams, merged
from specgen.tokenizer import Tokenizer

OVERRIDES = "sampling"
# A column alike to a parameter by this much is taken for a slip, not for the user's own data.
_SLIP_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row made ready. token_ids: BOS included. seed: the row's own noise seed, 0 <= seed < 2^63."""

    token_ids: list[int]
    params: SamplingParams
    seed: int


class PromptBuilder:
    """Makes rows ready, in input order (the order decides which copy of a repeated prompt is which).

    Remembers every different prompt of a row without an id, in at most 48 bytes each (`DigestMap`).
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        assert recipe.sampling.seed is not None
        self._defaults = recipe.sampling
        self._run_seed = recipe.sampling.seed
        self._prompt_column = recipe.input.prompt
        self._own_columns = {recipe.input.prompt, recipe.input.id, OVERRIDES, *recipe.input.keep}
        self._has_overrides = OVERRIDES not in recipe.input.keep
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._occurrences = DigestMap()

    def build(self, row: Row) -> Prompt:
        """Return the row's prompt.

        Raises: RowError with a code: missing_prompt, bad_prompt, empty_prompt, bad_text, bad_token_id, prompt_too_long,
        bad_sampling.
        """
        prompt = self._prompt_of(row.data)
        digest = seeds.content_hash(prompt)
        row_key = self._row_key(row, digest)
        overrides = self._overrides_of(row.data)
        try:
            params = merged(self._defaults, overrides, where=OVERRIDES)
        except SpecgenError as error:
            raise RowError(str(error), code=error.code) from None
        for name, ids in params.named_token_ids():
            self._check_ids(ids, f"sampling.{name}")
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_ids(token_ids, self._prompt_column)
        if len(token_ids) + 1 > self._max_model_len:
            raise RowError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for an answer within"
                f" max_model_len = {self._max_model_len}",
                code="prompt_too_long",
            )
        if overrides.get("seed") is not None:
            assert params.seed is not None
            return Prompt(token_ids, params, seeds.own_seed(params.seed, digest))
        return Prompt(token_ids, params, seeds.row_seed(self._run_seed, row_key))

    def _prompt_of(self, data: Mapping[str, Any]) -> str | list[int]:
        name = self._prompt_column
        if name not in data:
            close = checks.nearest(name, data)
            hint = f"did you mean {close!r}?" if close else f"columns: {', '.join(map(str, list(data)[:10])) or 'none'}"
            raise RowError(f"the row has no column {name!r}", hint=hint, code="missing_prompt")
        prompt = data[name]
        if isinstance(prompt, str):
            if not prompt:
                raise RowError(f"{name} is empty", code="empty_prompt")
            return prompt
        if not isinstance(prompt, list):
            raise RowError(
                f"{name} must be a text or a list of token ids, not {checks.shown(prompt)}", code="bad_prompt"
            )
        if not prompt:
            raise RowError(f"{name} is empty", code="empty_prompt")
        for item in prompt:
            if isinstance(item, bool) or not isinstance(item, int):
                raise RowError(f"{name} must hold token ids (integers), not {checks.shown(item)}", code="bad_prompt")
        return prompt

    def _overrides_of(self, data: Mapping[str, Any]) -> dict[str, object]:
        for column in data:
            slip = None if column in self._own_columns else _slip_for(column)
            if slip == OVERRIDES:
                raise RowError(
                    f"column {column!r} looks like {OVERRIDES!r}: sampling parameters go there",
                    hint="if it is your own, name it under input.keep",
                    code="bad_sampling",
                )
            if slip is not None:
                raise RowError(
                    f"column {column!r} looks like the sampling parameter {slip!r},"
                    f' which goes under "{OVERRIDES}": {{"{slip}": …}}',
                    hint="if it is your own, name it under input.keep",
                    code="bad_sampling",
                )
        overrides = data.get(OVERRIDES) if self._has_overrides else None
        if overrides is None:
            return {}
        if not isinstance(overrides, dict):
            raise RowError(f"{OVERRIDES} must be an object, not {checks.shown(overrides)}", code="bad_sampling")
        return overrides

    def _check_ids(self, token_ids: list[int] | tuple[int, ...], name: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RowError(
                    f"{name}: token id {token_id} is not in the model's vocabulary (0 to {self._vocab_size - 1})",
                    code="bad_token_id",
                )

    def _row_key(self, row: Row, digest: str) -> str:
        if row.id is not None:
            return seeds.row_key_of_id(row.id)
        return seeds.row_key_of_content(digest, self._occurrences.count(bytes.fromhex(digest)[:8]))


@functools.lru_cache(maxsize=4096)
def _slip_for(column: str) -> str | None:
    """Return the sampling parameter (or "sampling") that a column's name is, or nearly is."""
    plain = {name.replace("_", ""): name for name in (*PARAM_NAMES, OVERRIDES, "sampling_params")}
    close = checks.nearest(column.lower().replace("_", "").replace("-", ""), plain, cutoff=_SLIP_RATIO)
    if close is None:
        return None
    return OVERRIDES if plain[close] == "sampling_params" else plain[close]
