"""Output lines: one shape, strict JSON, valid UTF-8 whatever a row holds."""

import json
import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specgen.engine.request import TokenLogprob
from specgen.errors import RowError
from specgen.job.plan import Plan
from specgen.job.readers import BadRow, Row
from specgen.job.record import Answer, Kept, RecordForm, to_line
from specgen.stats import SpecStats

KEYS = ["id", "index", "sample", "key", "text", "finish_reason", "stop", "usage", "spec", "seed", "error", "input"]
FORM = RecordForm(with_token_ids=False, with_truncation=False)


def finished(data: dict[str, Any], text: str, form: RecordForm = FORM) -> dict[str, Any]:
    spec = SpecStats()
    spec.observe(3, 2, 3)
    answer = Answer(
        1,
        text=text,
        token_ids=[1, 2, 3],
        finish_reason="stop",
        stop="<eos>",
        prompt_tokens=21,
        cached_tokens=16,
        spec=spec,
        seed=5,
    )
    return form.record(Plan(Row(7, 8, "r7", data), "id:str:r7"), answer)


def test_a_finished_rows_line() -> None:
    line = to_line(finished({"prompt": "Ünder", "n": 1}, "täxt"))
    assert line.endswith(b"\n")
    assert "täxt".encode() in line
    record = json.loads(line)
    assert list(record) == KEYS
    assert record["id"] == "r7"
    assert record["index"] == 7
    assert (record["sample"], record["key"]) == (1, "id:str:r7")
    kept = FORM.parse(line)
    assert replace(kept, mark=0) == Kept("id:str:r7", 1, False, 7)
    assert kept.mark == FORM.mark(Plan(Row(7, 8, "r7", {"prompt": "Ünder", "n": 1}), ""))
    assert record["usage"] == {"prompt_tokens": 21, "completion_tokens": 3, "cached_tokens": 16}
    assert record["spec"]["accepted_per_pos"] == [1, 1, 0]
    assert record["spec"]["mean_accepted_length"] == 3.0
    assert record["error"] is None
    assert record["input"] == {"prompt": "Ünder", "n": 1}


def test_token_ids_are_added_on_request() -> None:
    record = finished({}, "", RecordForm(with_token_ids=True, with_truncation=True))
    assert list(record) == [*KEYS[:5], "token_ids", *KEYS[5:7], "prompt_truncated_from", *KEYS[7:]]
    assert record["token_ids"] == [1, 2, 3]


def test_log_probabilities_are_there_if_asked_for_and_what_is_not_finite_is_null() -> None:
    row = Plan(Row(0, 1, "a", {}), "id:str:a")
    entries = [TokenLogprob(5, -0.123456789, ((5, -0.123456789), (7, -math.inf))), TokenLogprob(1, -math.inf)]
    answer = Answer(0, token_ids=[5, 1], finish_reason="stop", stop="<eos>", logprobs=entries)
    answer.prompt_logprobs = [None, TokenLogprob(9, -2.0)]
    record = json.loads(to_line(FORM.record(row, answer)))
    assert list(record) == [*KEYS[:5], "logprobs", "prompt_logprobs", *KEYS[5:]]
    assert record["logprobs"] == [
        {"token_id": 5, "logprob": -0.1234568, "top": [[5, -0.1234568], [7, None]]},
        {"token_id": 1, "logprob": None, "top": []},
    ]
    assert record["prompt_logprobs"] == [None, {"token_id": 9, "logprob": -2.0, "top": []}]
    answer.error = RowError("broken", code="nan_logits")
    assert list(FORM.record(row, answer)) == KEYS


def test_a_failed_rows_line_has_the_same_keys() -> None:
    error = RowError("broken", code="bad_json")
    line = FORM.line(Plan(BadRow(2, 5, error), "row:1:0", error), Answer(None, error=error))
    record = json.loads(line)
    assert list(record) == KEYS
    assert replace(FORM.parse(line), mark=0) == Kept("row:1:0", None, True, 2)
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
    marks = {
        FORM.parse(line).mark,
        FORM.parse(json.dumps(record).encode()).mark,
        FORM.mark(Plan(Row(7, 8, "", data), "")),
    }
    assert len(marks - {0}) == 1  # also if somebody else wrote the line anew


def test_lone_surrogates_stay_escaped() -> None:
    line = to_line(finished({"x": "a\ud800b\udfff"}, "🙂"))
    assert b"\\ud800" in line
    assert json.loads(line.decode("utf-8"))["input"] == {"x": "a\ud800b\udfff"}
