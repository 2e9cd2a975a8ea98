"""OpenAI batch files: what a request asks for, in specgen's terms.

Knows the request bodies of chat completions and completions, and refuses by name what is not supported. Does not know
how answers are written (`openai_answers.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specgen import checks
from specgen.errors import RowError
from specgen.job.contents import Content, checked_messages, checked_prompt
from specgen.sampling_params import PARAM_NAMES

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# They say nothing about the answer.
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# They may be given, as long as they say what is done anyway.
_ONLY: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
# Parameters of ours that have no place in such an answer.
_NO_PLACE = {"prompt_logprobs"}
_MAX_TOP_LOGPROBS = 20


class BatchRequest(NamedTuple):
    """A request: where it is sent, which model it names, what is to be continued and with which parameters."""

    url: str
    model: str
    content: Content
    overrides: Mapping[str, object]


def request_of(data: Mapping[str, Any]) -> BatchRequest:
    """Return the request of a batch file's line.

    Raises: RowError with code bad_request, bad_sampling, bad_messages, bad_prompt or empty_prompt.
    """
    for name in ("custom_id", "body"):
        if data.get(name) is None:
            raise RowError(f"the request has no {name}", code="bad_request")
    method, url, body = data.get("method", "POST"), data.get("url"), data["body"]
    if method != "POST":
        raise RowError(f"method must be POST, not {checks.shown(method)}", code="bad_request")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RowError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}, not {checks.shown(url)}", code="bad_request")
    if not isinstance(body, dict):
        raise RowError(f"body must be an object, not {checks.shown(body)}", code="bad_request")
    model = body.get("model")
    if not isinstance(model, str):
        raise RowError(f"body.model must be a text, not {checks.shown(model)}", code="bad_request")
    name = "messages" if url == CHAT_URL else "prompt"
    if body.get(name) is None:
        raise RowError(f"body has no {name}", code="missing_prompt")
    content: Content
    if url == CHAT_URL:
        content = checked_messages(body[name], "body.messages")
    else:
        content = checked_prompt(_only_prompt(body[name]), "body.prompt")
    return BatchRequest(url, model, content, _overrides_of(body, name, is_chat=url == CHAT_URL))


def _only_prompt(prompt: object) -> object:
    """A list with one prompt in it is that prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise RowError("body.prompt has several prompts: give each a request of its own", code="bad_prompt")
        return prompt[0]
    return prompt


def _overrides_of(body: Mapping[str, Any], prompt_name: str, *, is_chat: bool) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for name, value in body.items():
        if value is None or name in _IGNORED or name == prompt_name:
            continue
        if name == "logprobs":
            number = _num_logprobs(body, is_chat=is_chat)
            if number is not None:
                overrides["logprobs"] = number
        elif name == "top_logprobs" and is_chat:
            if body.get("logprobs") is not True:
                raise RowError("top_logprobs goes with logprobs = true", code="bad_sampling")
        elif name == "max_completion_tokens":
            if body.get("max_tokens") not in (None, value):
                raise RowError("max_tokens and max_completion_tokens differ", code="bad_sampling")
            overrides["max_tokens"] = value
        elif name in PARAM_NAMES and name not in _NO_PLACE:
            overrides[name] = value
        elif name not in _ONLY:
            known = {*PARAM_NAMES, "max_completion_tokens", "top_logprobs"} - {name}
            close = checks.nearest(name, sorted(known))
            hint = f"did you mean {close!r}?" if close else None
            raise RowError(f"unknown or unsupported parameter {name!r}", hint=hint, code="bad_sampling")
        elif value not in _ONLY[name]:
            raise RowError(f"{name} = {checks.shown(value)} is not supported", code="bad_sampling")
    return overrides


def _num_logprobs(body: Mapping[str, Any], *, is_chat: bool) -> object:
    """Chat says whether, and how many beside the chosen one; completions say how many."""
    if not is_chat:
        return body["logprobs"]
    if not isinstance(body["logprobs"], bool):
        raise RowError(f"logprobs must be true or false, not {checks.shown(body['logprobs'])}", code="bad_sampling")
    top = body.get("top_logprobs") or 0
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise RowError(f"top_logprobs must be an integer from 0 to {_MAX_TOP_LOGPROBS}", code="bad_sampling")
    if not body["logprobs"]:
        return None
    return top
