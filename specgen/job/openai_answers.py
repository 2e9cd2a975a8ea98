"""Answers in the form of OpenAI's batch output: one line a request, with all its choices.

Knows the objects that the official client's types describe. Log-probabilities are in them if a row asked for any.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from specgen.engine.request import TokenLogprob
from specgen.job.openai_batch import CHAT_URL
from specgen.job.plan import Plan
from specgen.job.record import Answer, Kept, error_of, to_line

_ID_START = "batch_req_"
_RULED_OUT = -9999.0
# Errors that are not the request's own.
_SERVER_ERRORS = ("engine", "aborted", "nan_logits")


class BatchForm:
    """One line a request, once all its samples have ended. created: seconds since 1970, in every answer.

    token_text: the text of a token id, for log-probabilities.
    """

    def __init__(self, created: int, token_text: Callable[[int], str]) -> None:
        self._created = created
        self._token_text = token_text
        self._started: dict[str, list[Answer]] = {}

    def num_lines(self, plan: Plan) -> int:
        """Return 1."""
        return 1

    def key(self, plan: Plan) -> str:
        """Return the key under which `parse` knows the row again."""
        return _ID_START + _digest(plan)

    def mark(self, plan: Plan) -> int:
        """Return 0: a response does not hold its request."""
        return 0

    def line(self, plan: Plan, answer: Answer) -> bytes | None:
        """Return the request's line if this was its last sample."""
        answers = self._started.setdefault(plan.key, [])
        answers.append(answer)
        if answer.sample is not None and len(answers) < len(plan.samples):
            return None
        del self._started[plan.key]
        answers.sort(key=lambda one: one.sample or 0)
        failed = next((one for one in answers if one.error is not None), None)
        digest = _digest(plan)
        line: dict[str, Any] = {"id": _ID_START + digest, "custom_id": plan.row.id, "response": None, "error": None}
        if failed is not None and plan.row.id is None:  # not a request that anybody could have answered
            line["error"] = error_of(plan, failed.error)
        elif failed is not None:
            line["response"] = _response(digest, *_failure(failed))
        else:
            line["response"] = _response(digest, 200, self._body(plan, answers, digest))
        return to_line(line)

    def parse(self, line: bytes) -> Kept:
        """Return what a line says; its key is its id. Raises: ValueError if it is no line of this form."""
        record = json.loads(line)
        name = record.get("id") if isinstance(record, dict) else None
        if not isinstance(name, str) or not name.startswith(_ID_START) or "custom_id" not in record:
            raise ValueError("an object that is no answer of a batch")
        response = record.get("response")
        return Kept(name, None, response is None or response.get("status_code") != 200, 0)

    def _body(self, plan: Plan, answers: Sequence[Answer], digest: str) -> dict[str, Any]:
        assert plan.batch is not None
        is_chat = plan.batch.url == CHAT_URL
        num_prompt, num_answer = answers[0].prompt_tokens, sum(len(one.token_ids) for one in answers)
        cut = answers[0].truncated_from
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": plan.batch.model,
            "choices": [self._choice(one, is_chat=is_chat) for one in answers],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_answer,
                "total_tokens": num_prompt + num_answer,
                "prompt_tokens_details": {"cached_tokens": max(one.cached_tokens for one in answers)},
            },
        } | ({} if cut is None else {"prompt_truncated_from": cut})

    def _choice(self, answer: Answer, *, is_chat: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": answer.sample}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        logprobs = None
        if answer.logprobs is not None:
            of = self._chat_logprobs if is_chat else self._completion_logprobs
            logprobs = of(answer.logprobs)
        return choice | {"logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._token(entry.token_id, entry.logprob) | {"top_logprobs": [self._token(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        has_bytes = "\ufffd" not in text  # half a character has no text of its own
        return {"token": text, "logprob": _floor(logprob), "bytes": list(text.encode("utf-8")) if has_bytes else None}

    def _completion_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._token_text(entry.token_id) for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [_floor(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._token_text(token): _floor(value) for token, value in entry.top} for entry in entries
            ],
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][: len(tokens)],
        }


def _digest(plan: Plan) -> str:
    return hashlib.blake2b(plan.key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _floor(logprob: float) -> float:
    """The value that stands for "ruled out" is OpenAI's."""
    return max(float(f"{logprob:.7g}"), _RULED_OUT)


def _failure(answer: Answer) -> tuple[int, dict[str, Any]]:
    assert answer.error is not None
    code = answer.error.code
    is_ours = code in _SERVER_ERRORS
    kind = "server_error" if is_ours else "invalid_request_error"
    error = {"message": str(answer.error), "type": kind, "param": None, "code": code}
    return 500 if is_ours else 400, {"error": error}


def _response(digest: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": digest, "body": body}
