"""Output lines: one shape, strict JSON, valid UTF-8 whatever a row holds."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specgen.errors import RowError
from specgen.job.readers import BadRow, Row
from specgen.job.record import error_record, ok_record, to_line, usage_of
from specgen.stats import SpecStats

KEYS = ["id", "index", "text", "finish_reason", "stop", "usage", "spec", "seed", "error", "input"]


def finished(data: dict[str, Any], text: str, token_ids: list[int] | None = None) -> dict[str, Any]:
    spec = SpecStats()
    spec.observe(3, 2, 3)
    return ok_record(
        Row(7, 8, "r7", data),
        text=text,
        token_ids=token_ids,
        finish_reason="stop",
        stop="<eos>",
        usage=usage_of(21, 3, 16),
        spec=spec,
        seed=5,
    )


def test_a_finished_rows_line() -> None:
    line = to_line(finished({"prompt": "Ünder", "n": 1}, "täxt"))
    assert line.endswith(b"\n")
    assert "täxt".encode() in line
    record = json.loads(line)
    assert list(record) == KEYS
    assert record["id"] == "r7"
    assert record["index"] == 7
    assert record["usage"] == {"prompt_tokens": 21, "completion_tokens": 3, "cached_tokens": 16}
    assert record["spec"]["accepted_per_pos"] == [1, 1, 0]
    assert record["spec"]["mean_accepted_length"] == 3.0
    assert record["error"] is None
    assert record["input"] == {"prompt": "Ünder", "n": 1}


def test_token_ids_are_added_on_request() -> None:
    assert list(finished({}, "", [1, 2])) == [*KEYS[:3], "token_ids", *KEYS[3:]]


def test_a_failed_rows_line_has_the_same_keys() -> None:
    record = json.loads(
        to_line(error_record(BadRow(2, 5, RowError("broken", code="bad_json")), RowError("broken", code="bad_json")))
    )
    assert list(record) == KEYS
    assert record["finish_reason"] == "error"
    assert record["text"] is record["stop"] is record["spec"] is record["seed"] is record["input"] is None
    assert record["error"] == {"code": "bad_json", "message": "broken", "line": 5}
    assert record["usage"]["completion_tokens"] == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON), st.text())
def test_every_row_comes_back_as_it_was_read(data: dict[str, Any], text: str) -> None:
    line = to_line(finished(data, text))
    assert line.count(b"\n") == 1
    record = json.loads(line.decode("utf-8"))
    assert record["input"] == data
    assert record["text"] == text


def test_lone_surrogates_stay_escaped() -> None:
    line = to_line(finished({"x": "a\ud800b\udfff"}, "🙂"))
    assert b"\\ud800" in line
    assert json.loads(line.decode("utf-8"))["input"] == {"x": "a\ud800b\udfff"}
