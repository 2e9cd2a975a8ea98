"""The output line of a row: its shape, and strict JSON in valid UTF-8.

The keys are always the same and in the same order. For a row that failed: text, stop and seed are null, error is an
object, usage counts what was really computed (0 for a row that never ran) and spec is null if it never ran.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from specgen.errors import RowError
from specgen.job.readers import BadRow, Row
from specgen.stats import SpecStats

_SURROGATE = re.compile("[\ud800-\udfff]")


def ok_record(
    row: Row,
    *,
    text: str,
    token_ids: Sequence[int] | None,
    finish_reason: str,
    stop: str | int | None,
    usage: dict[str, int],
    spec: SpecStats,
    seed: int,
) -> dict[str, Any]:
    """Return the record of a row that finished; `token_ids` (None: leave out) are all ids, the ending one included."""
    record: dict[str, Any] = {"id": row.id, "index": row.index, "text": text}
    if token_ids is not None:
        record["token_ids"] = list(token_ids)
    return record | {
        "finish_reason": finish_reason,
        "stop": stop,
        "usage": usage,
        "spec": spec.as_dict(),
        "seed": seed,
        "error": None,
        "input": row.data,
    }


def error_record(
    row: Row | BadRow,
    error: RowError,
    *,
    with_token_ids: bool = False,
    usage: dict[str, int] | None = None,
    spec: SpecStats | None = None,
) -> dict[str, Any]:
    """Return the record of a row that failed, before it ran or while it did."""
    record: dict[str, Any] = {"id": row.id, "index": row.index, "text": None}
    if with_token_ids:
        record["token_ids"] = None
    return record | {
        "finish_reason": "error",
        "stop": None,
        "usage": usage or usage_of(0, 0, 0),
        "spec": spec.as_dict() if spec is not None else None,
        "seed": None,
        "error": {"code": error.code, "message": str(error), "line": row.line},
        "input": row.data,
    }


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, int]:
    """Return the `usage` object, in tokens; cached_tokens are those of the prompt found in the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
    }


def to_line(record: dict[str, Any]) -> bytes:
    """Return the record as one line of strict JSON in UTF-8, newline included; lone surrogates stay escaped."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8") + b"\n"
