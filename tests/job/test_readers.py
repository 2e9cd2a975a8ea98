"""Rows from bytes: every odd line has its outcome, and none disturbs the next."""

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import InputError
from specgen.job.readers import BadRow, Row, RowReader, jsonl_lines


def read(data: bytes, **options: Any) -> list[Row | BadRow]:
    return list(reader(io.BytesIO(data), **options))


def reader(stream: Any, **options: Any) -> RowReader:
    return RowReader(jsonl_lines(stream, where="in"), where="in", **options)


GOOD = b'{"id": "g", "prompt": "x"}\n'


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"prompt": "x"', "bad_json"),
        (b'{"prompt": "x"} {"prompt": "y"}', "bad_json"),
        (b"nonsense", "bad_json"),
        (b'{"prompt": NaN}', "bad_json"),
        (b'{"prompt": "x", "score": -Infinity}', "bad_json"),
        (b'{"prompt": "x", "score": 1e999}', "bad_json"),
        (b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}", "bad_json"),
        (b'{"prompt": "a\0b"}', "bad_json"),
        (b'{"prompt": "x", "prompt": "y"}', "bad_json"),
        (b'{"prompt": "x", "deep": {"a": 1, "a": 2}}', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"prompt": "x", "deep": ' + b"[" * 101 + b"]" * 101 + b"}", "bad_json"),
        (b'{"prompt": "\xff"}', "bad_utf8"),
        (b'{"prompt": "\xc3"}', "bad_utf8"),
        (b'["prompt"]', "not_an_object"),
        (b'"prompt"', "not_an_object"),
        (b"17", "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"id": true}', "bad_id"),
        (b'{"id": 1.5}', "bad_id"),
        (b'{"id": [1]}', "bad_id"),
        (b'{"id": ""}', "bad_id"),
    ],
)
def test_a_bad_line_is_its_own_error(line: bytes, code: str) -> None:
    rows = read(b"\n" + line + b"\n" + GOOD)
    bad, good = rows
    assert isinstance(bad, BadRow)
    assert (bad.index, bad.line, bad.error.code) == (0, 2, code)
    assert isinstance(good, Row)
    assert (good.index, good.line, good.id, good.data["prompt"]) == (1, 3, "g", "x")


def test_the_column_of_broken_json_is_that_of_the_line() -> None:
    for end in (b"", b"\n", b"\r\n"):
        (row,) = read(b'{"prompt": "x"' + end)
        assert isinstance(row, BadRow)
        assert row.error.message.endswith("at column 15")
    (row,) = read(b'{"prompt": "a\0b"}')
    assert isinstance(row, BadRow)
    assert row.error.message == "the line is not JSON: Invalid control character at column 14"


def test_what_is_not_nested_too_deep_is_read_however_many_there_are() -> None:
    (row,) = read(b'{"wide": ' + b"[" + b"[]," * 500 + b"[]]" + b', "deep": ' + b"[" * 99 + b"]" * 99 + b"}")
    assert isinstance(row, Row)


def test_a_list_of_objects_on_one_line_is_known_by_its_beginning() -> None:
    stream = io.BytesIO(b'[{"prompt": "a"}, ' + b" " * 1_000_000 + b"]")
    with pytest.raises(InputError, match="an array of objects"):
        list(reader(stream))
    assert stream.tell() < 100_000


def test_a_long_first_line_is_whole() -> None:
    (row,) = read(b'\xef\xbb\xbf{"prompt": "' + b"x" * 200_000 + b'"}')
    assert isinstance(row, Row)
    assert len(row.data["prompt"]) == 200_000


def test_bom_crlf_blank_lines_and_a_missing_last_newline() -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n\t\n{"prompt": "\xe2\x80\xa8"}'
    source = reader(io.BytesIO(data))
    rows = list(source)
    assert [(type(row), row.index, row.line) for row in rows] == [(Row, 0, 1), (Row, 1, 5)]
    assert source.blank_lines == 3


def test_ids_may_be_texts_numbers_or_missing() -> None:
    rows = read(b'{"id": "1"}\n{"id": 1}\n{"id": null}\n{}\n{"id": 0}\n')
    assert [row.id for row in rows if isinstance(row, Row)] == ["1", 1, None, None, 0]


def test_a_duplicate_id_names_both_lines() -> None:
    rows = read(b'{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n{"id": "a"}\n')
    assert [type(row) for row in rows] == [Row, Row, BadRow, BadRow]
    for row in rows[2:]:
        assert isinstance(row, BadRow)
        assert row.error.code == "duplicate_id"
        assert "line 1" in row.error.message
        assert f"line {row.line}" in row.error.message
        assert row.data == {"id": "a"}


def test_another_id_column() -> None:
    rows = read(b'{"key": 5, "id": [1]}\n', id_column="key")
    assert isinstance(rows[0], Row)
    assert rows[0].id == 5


def test_the_limit_counts_rows_and_reads_no_further() -> None:
    stream = io.BytesIO(b"\n" + GOOD.replace(b'"id": "g", ', b"") * 50)
    assert len(list(reader(stream, limit=3))) == 3
    assert b'"x"' in stream.readline()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_have_an_outcome_and_the_next_row_lives(data: bytes) -> None:
    rows = read(b"\n" + data + b"\n" + GOOD)  # the very first bytes may say that this is no JSONL at all
    assert isinstance(rows[-1], Row)
    assert [row.index for row in rows] == list(range(len(rows)))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.text() | st.integers() | st.booleans(), st.lists))
)
def test_good_rows_come_back_as_they_were(data: dict[str, Any]) -> None:
    data["id"] = "x"
    (row,) = read(json.dumps(data).encode() + b"\n")
    assert isinstance(row, Row)
    assert row.data == data


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"\x1f\x8b\x08", "gzip"), (b"PAR1", "Parquet"), (b"\xff\xfe{\0", "UTF-16"), (b"PK\x03\x04", "zip")],
)
def test_files_of_another_kind_are_named(start: bytes, kind: str) -> None:
    with pytest.raises(InputError, match=f"in: this is a {kind} file"):
        read(start + b"rest")


def test_lines_that_cannot_matter_are_counted_unparsed() -> None:
    data = b'{"prompt": "x"}\n\n{"id": 1}\nbroken\n{"\\u0069d": 2}\n'
    lines = list(jsonl_lines(io.BytesIO(data), where="in", only_if=b'"id"'))
    assert [line.data for line in lines] == [{}, None, {"id": 1}, {}, {"id": 2}]
    assert [line.error for line in lines] == [None] * 5
