"""Texts made from rows by Jinja templates, in a sandbox: a chat by the model's template, columns by the recipe's.

Knows where a chat template comes from and what it may use. Does not know tokens: a chat template writes its special
tokens itself, and nothing is put before or behind what it gives.
"""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from specgen import checks
from specgen.errors import ModelError, RecipeError, RowError
from specgen.job.contents import Base64, Chat
from specgen.job.sandbox import Sandbox, TooMuchError
from specgen.tokenizer import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ColumnTemplate:
    """A Jinja template whose names are a row's columns; a name that is no column, or null, is the row's error."""

    def __init__(self, text: str) -> None:
        """Raises: RecipeError if it is no template."""
        # Taken as it is written: no newline behind a block is dropped.
        self._sandbox = Sandbox(_text_of, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
        try:
            self._template = self._sandbox.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"input.template is no template: {error.message} (line {error.lineno})") from None

    def render(self, data: Mapping[str, Any]) -> str:
        """Return the text for a row.

        Raises: RowError with code bad_template or empty_prompt.
        """
        columns = f"columns: {', '.join(map(str, list(data)[:10])) or 'none'}"
        text = _rendered(self._sandbox, self._template, dict(data), "input.template", hint=columns)
        if not text:
            raise RowError("input.template gave an empty text", code="empty_prompt")
        return text


class ChatTemplate:
    """A chat template with what it is always given. text: the template itself. origin: where it comes from.

    system: put before chats without a system message. args: given to every rendering; `now` (an ISO date) defines
    strftime_now, which does not exist otherwise, as answers must not depend on the day.
    """

    def __init__(
        self, text: str, origin: str, *, tokens: Mapping[str, str], system: str | None, args: Mapping[str, Any] | None
    ) -> None:
        """Raises: RecipeError if it is no template, or `now` no date."""
        self.text = text
        self.origin = origin
        self._system = system
        self._context: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        self._context |= {**tokens, **(args or {})}
        self._sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True)
        now = self._context.pop("now", None)
        if now is not None:
            self._sandbox.globals["strftime_now"] = _moment(now).strftime
        try:
            self._template = self._sandbox.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(
                f"the chat template is broken: {error.message} (line {error.lineno})", where=origin
            ) from None

    @classmethod
    def of(
        cls, folder: Path, file: str | None, *, system: str | None, args: Mapping[str, Any] | None
    ) -> "ChatTemplate | None":
        """Return the template in `file`, or else the model's own; None if it has none.

        Raises: RecipeError, ModelError if it cannot be read or is no template.
        """
        config = read_json(folder / "tokenizer_config.json")
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        own = folder / "chat_template.jinja"
        if file is not None:
            text, origin = _read(Path(file), RecipeError), file
        elif own.is_file():
            text, origin = _read(own, ModelError), str(own)
        else:
            declared = config.get("chat_template")
            if isinstance(declared, list):  # several, by name
                named = (item for item in declared if isinstance(item, dict) and item.get("name") == "default")
                declared = next(named, {}).get("template")
            if not isinstance(declared, str):
                return None
            text, origin = declared, str(folder / "tokenizer_config.json")
        return cls(text, origin, tokens=tokens, system=system, args=args)

    def render(self, chat: Chat) -> str:
        """Return the text for a chat.

        Raises: RowError with code bad_template: the template refused it.
        """
        messages = chat.messages
        if self._system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._system}, *messages]
        return _rendered(self._sandbox, self._template, {**self._context, "messages": messages}, "the chat template")


def no_template(folder: Path) -> RecipeError:
    """Return the error of a chat for a model without a template."""
    return RecipeError(
        "the rows are chats and the model has no chat template",
        where=str(folder),
        hint="input.chat_template names a file with one",
    )


def _text_of(value: object) -> object:
    if value is None:
        raise jinja2.TemplateError("a value is null, and would be written as None; {{ x or '' }} leaves it out")
    if isinstance(value, Base64):
        raise jinja2.TemplateError(f"a value is {checks.shown(value)}, which are no text")
    return value


def _rendered(
    sandbox: Sandbox, template: jinja2.Template, context: dict[str, Any], what: str, hint: str | None = None
) -> str:
    try:
        return sandbox.rendered(template, context)
    except TooMuchError as error:
        raise RowError(f"{what} {error}", code="bad_template") from None
    except RecursionError:
        raise RowError(f"{what} does not end", code="bad_template") from None
    except Exception as error:  # a template may raise whatever its expressions do
        told = " ".join(str(error).split())[:300]
        raise RowError(f"{what} refuses the row: {told}", hint=hint, code="bad_template") from None


def _moment(now: object) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(str(now))
    except ValueError:
        raise RecipeError(f"input.template_args.now must be a date like 2026-01-31, not {checks.shown(now)}") from None


def _read(path: Path, kind: type[RecipeError] | type[ModelError]) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a BOM is no part of it
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise kind(f"the chat template cannot be read: {reason}", where=str(path)) from None


def _token_text(declared: object) -> str | None:
    if isinstance(declared, dict):  # an AddedToken written out
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
