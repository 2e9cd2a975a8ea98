"""What a prompt can be: a text, token ids or a chat, each checked; and its content hash.

Knows the shapes and what is wrong with them. Does not know columns, templates or tokens.
"""

import json
from typing import Any, NamedTuple

from specgen import checks, seeds
from specgen.errors import RowError


class Base64(str):
    """The text that stands for bytes, which JSON does not have: fit to be shown and kept, but no prompt."""

    def __repr__(self) -> str:
        """Return it as it is named in messages."""
        return f"bytes (in base64: {str(self)!r})"


class Chat(NamedTuple):
    """A conversation to be continued, its messages as objects with a role and a text."""

    messages: list[dict[str, Any]]


Content = str | list[int] | Chat


def checked_prompt(prompt: object, name: str) -> str | list[int]:
    """Return a prompt that is a text or a list of integers, and not empty.

    Raises: RowError with code empty_prompt or bad_prompt.
    """
    if prompt is None:
        raise _is_null(name)
    if not isinstance(prompt, (str, list)) or isinstance(prompt, Base64):
        raise RowError(f"{name} must be a text or a list of token ids, not {checks.shown(prompt)}", code="bad_prompt")
    if not prompt:
        raise RowError(f"{name} is empty", code="empty_prompt")
    if isinstance(prompt, list):
        for item in prompt:
            if isinstance(item, bool) or not isinstance(item, int):
                raise RowError(f"{name} must hold token ids (integers), not {checks.shown(item)}", code="bad_prompt")
    return prompt


def checked_messages(messages: object, name: str) -> Chat:
    """Return a chat of messages that each have a role and a text; parts of text are joined.

    Raises: RowError with code empty_prompt or bad_messages.
    """
    if messages is None:
        raise _is_null(name)
    if not isinstance(messages, list):
        raise RowError(f"{name} must be a list of messages, not {checks.shown(messages)}", code="bad_messages")
    if not messages:
        raise RowError(f"{name} is empty", code="empty_prompt")
    return Chat([_message(message, f"{name}[{number}]") for number, message in enumerate(messages)])


def _is_null(name: str) -> RowError:
    return RowError(f"{name} is null, or an empty cell", code="empty_prompt")


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(
            f"{where} must be an object with role and content, not {checks.shown(message)}", code="bad_messages"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where}.role must be a text, not {checks.shown(role)}", code="bad_messages")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str) or isinstance(content, Base64):
        raise RowError(f"{where}.content must be a text, not {checks.shown(content)}", code="bad_messages")
    return {**message, "content": content}


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError(f"{where}: only parts of text are supported, not {checks.shown(kind)}", code="bad_messages")


def content_digest(content: Content) -> str:
    """Return the content hash of a prompt; a text, ids and a chat never share one by design."""
    if isinstance(content, Chat):
        return seeds.content_hash(json.dumps(content.messages, sort_keys=True), kind="chat")
    return seeds.content_hash(content)
