"""From a planned row to what the engine is asked for, or to the reason why not.

Knows tokens, BOS, the length limit and how a prompt is cut. Does not know files, engines or columns (`plan.py`).

Special tokens: a chat template owns its own, nothing is put before or behind what it gives; a raw text gets the model's
BOS once, also if it brings it; token ids are taken as they are.

The limit: prompt and answer together have at most `max_model_len` tokens. A prompt of max_model_len - 1 tokens gets one
token; a longer one is an error, or is cut if the recipe says so. An empty prompt is an error too; a prompt that is only
the BOS text is run.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import RecipeError, RowError
from specgen.job.contents import Chat, Content
from specgen.job.plan import Plan, RowPlanner
from specgen.job.readers import BadRow, Row
from specgen.job.templates import ChatTemplate, no_template
from specgen.recipe import Recipe
from specgen.sampling_params import SamplingError, SamplingParams
from specgen.tokenizer import Tokenizer, check_text, read_json

logger = logging.getLogger(__name__)

# Prompts that are made at once: so many, or so many characters (or ids), whichever is reached first.
_BATCH_ROWS = 256
_BATCH_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row made ready. token_ids: BOS included. seed: of its first sample, 0 <= seed < 2^63.

    truncated_from: how many tokens the prompt had before it was cut, None if it was not.
    """

    token_ids: list[int]
    params: SamplingParams
    seed: int
    truncated_from: int | None = None


class PromptBuilder:
    """Makes rows ready. template: for chats. eos_token_ids: of the model; a row must leave itself another token."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        template: ChatTemplate | None = None,
        planner: RowPlanner | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        assert recipe.sampling.seed is not None
        self.run_seed = recipe.sampling.seed
        self._planner = planner or RowPlanner(recipe)
        self._section = recipe.input
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._has_warned_of_bos = False
        self._checked_params: SamplingParams | None = None

    def build(self, row: Row) -> Prompt:
        """Return the row's prompt.

        Raises: RowError with a code, see `RowPlanner.plan` and `build_planned`.
        """
        return self.build_planned(self._planner.plan(row))

    def build_planned(self, plan: Plan) -> Prompt:
        """Return the prompt of a planned row.

        Raises: RowError: the plan's own, or one with code bad_text, bad_template, empty_prompt, bad_token_id,
            prompt_too_long.
        """
        ((_, prompt),) = self.build_all([plan])
        if isinstance(prompt, RowError):
            raise prompt
        return prompt

    def build_all(self, plans: Iterable[Plan]) -> Iterator[tuple[Plan, Prompt | RowError]]:
        """Yield every plan with its prompt, or with what `build_planned` raises.

        Texts become tokens many at a time, by as many threads as the tokenizer has.
        """
        batch: list[tuple[Plan, str | list[int] | RowError]] = []
        size = 0
        for plan in plans:
            try:
                content = self._text_or_ids(plan)
                size += len(content)
                batch.append((plan, content))
            except RowError as error:
                batch.append((plan, error))
            if len(batch) == _BATCH_ROWS or size >= _BATCH_SIZE:
                yield from self._built(batch)
                batch, size = [], 0
        yield from self._built(batch)

    def _text_or_ids(self, plan: Plan) -> str | list[int]:
        """Return what a row asks for. Raises: RowError."""
        if plan.error is not None:
            raise plan.error
        assert plan.content is not None and plan.params is not None
        params = plan.params
        if params is not self._checked_params:  # most rows have the recipe's
            for name, ids in params.named_token_ids():
                self._check_ids(ids, f"sampling.{name}")
            try:
                params.require_a_choice(self._eos_token_ids)
            except SamplingError as error:
                raise RowError(f"sampling: {error}", code=error.code) from None
            self._checked_params = params
        content: Content = plan.content
        if isinstance(content, Chat):
            if self._template is None:
                hint = "input.chat_template names a file with one"
                raise RowError("the model has no chat template", hint=hint, code="bad_template")
            content = self._template.render(content)
        if not isinstance(content, str):
            return list(content)
        check_text(content)
        return content

    def _built(
        self, batch: Sequence[tuple[Plan, str | list[int] | RowError]]
    ) -> Iterator[tuple[Plan, Prompt | RowError]]:
        encoded = iter(self._tokenizer.encode_batch([content for _, content in batch if isinstance(content, str)]))
        for plan, content in batch:
            if isinstance(content, RowError):
                yield plan, content
                continue
            try:
                yield plan, self._prompt_of(plan, next(encoded) if isinstance(content, str) else content)
            except RowError as error:
                yield plan, error

    def _prompt_of(self, plan: Plan, token_ids: list[int]) -> Prompt:
        """Return the prompt of what a row asks for, its text as tokens. Raises: RowError."""
        name = self._section.prompt
        if isinstance(plan.content, str | Chat):
            name = "the prompt's text, by the model's tokenizer"
        if isinstance(plan.content, str):
            self._warn_of_bos(plan.content, plan.row)
            token_ids = self._tokenizer.with_prefix(token_ids)
        if not token_ids:
            what = "the chat template gave an empty text" if isinstance(plan.content, Chat) else "its text has none"
            raise RowError(f"the prompt has no tokens: {what}", code="empty_prompt")
        self._check_ids(token_ids, name)
        assert plan.params is not None
        cut = self._cut(token_ids, plan.params)
        truncated_from = len(token_ids) if len(cut) < len(token_ids) else None
        return Prompt(cut, plan.params, plan.seed(self.run_seed, 0), truncated_from)

    def _warn_of_bos(self, text: str, row: Row | BadRow) -> None:
        bos = self._tokenizer.bos_text
        if bos and self._tokenizer.prefix_ids and text.startswith(bos) and not self._has_warned_of_bos:
            self._has_warned_of_bos = True
            place = f"line {row.line}" if row.file is None else f"{row.file}:{row.line}"
            logger.warning("%s: the prompt begins with %s, so none is put before it (said once)", place, bos)

    def _cut(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the prompt as it fits. Raises: RowError with code prompt_too_long."""
        section, count = self._section, len(token_ids)
        most = min(section.max_prompt_tokens or self._max_model_len, self._max_model_len - 1)
        if count <= most:
            return token_ids
        if section.truncate is None:
            limit = (
                f"max_model_len = {self._max_model_len}, which leaves no room for an answer"
                if most == self._max_model_len - 1
                else f"input.max_prompt_tokens = {section.max_prompt_tokens}"
            )
            raise RowError(
                f"the prompt has {count} tokens; the limit is {limit}",
                hint="input.truncate=left or middle cuts such prompts",
                code="prompt_too_long",
            )
        if section.max_prompt_tokens is None and params.max_tokens is not None:
            most = min(most, max(self._max_model_len // 2, self._max_model_len - params.max_tokens))
        return _truncated(token_ids, most, section.truncate, self._num_leading(token_ids))

    def _num_leading(self, token_ids: Sequence[int]) -> int:
        """How many ids at the start stay whatever is cut: the BOS."""
        return int(token_ids[0] == self._tokenizer.bos_token_id)

    def _check_ids(self, token_ids: Sequence[int], name: str) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise RowError(
                f"{name}: token id {wrong} is not in the model's vocabulary (0 to {self._vocab_size - 1})",
                code="bad_token_id",
            )


def check_token_ids(recipe: Recipe, folder: Path) -> None:
    """Return if the recipe's sampling parameters name only ids that the model in `folder` has.

    Raises: RecipeError: every row without its own would fail.
    """
    vocab_size = read_json(folder / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        return  # whoever loads the model will say so
    for name, ids in recipe.sampling.named_token_ids():
        if ids and max(ids) >= vocab_size:
            raise RecipeError(
                f"sampling.{name}: token id {max(ids)} is not in the model's vocabulary (0 to {vocab_size - 1})",
                where=recipe.origins.get(f"sampling.{name}"),
            )


def chat_template_of(recipe: Recipe, folder: Path, *, needed: bool) -> ChatTemplate | None:
    """Return the chat template of a recipe's chats, None if it has no chats.

    needed: whether the rows are, or may be, chats.

    Raises: RecipeError if there is none, or it is broken; or if there are no chats and the recipe has keys for them.
    """
    section = recipe.input
    if not needed:
        for name in ("system", "chat_template", "template_args"):
            if getattr(section, name) is not None:
                raise RecipeError(
                    f"input.{name} has no effect: the rows are no chats",
                    where=recipe.origins.get(f"input.{name}"),
                    hint="input.messages names the column that holds a chat",
                )
        return None
    template = ChatTemplate.of(folder, section.chat_template, system=section.system, args=section.template_args)
    if template is None and section.messages is not None:
        raise no_template(folder)
    return template


def _truncated(token_ids: list[int], most: int, where: str, num_leading: int) -> list[int]:
    """Return `most` of the ids: the last ones, or the first and last ones; the leading ones stay."""
    leading = token_ids[: min(num_leading, most)]
    rest = most - len(leading)
    body = token_ids[num_leading:]
    num_first = rest // 2 if where == "middle" else 0
    num_last = rest - num_first
    return leading + body[:num_first] + body[len(body) - num_last :]
