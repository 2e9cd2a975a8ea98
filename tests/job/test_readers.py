"""Rows from bytes: every odd line has its outcome, and none disturbs the next."""

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import InputError
from specgen.job.readers import BadRow, ReadAhead, Row, RowReader, count_lines, open_input


def read(data: bytes, **options: Any) -> list[Row | BadRow]:
    return list(RowReader(io.BytesIO(data), where="in", **options))


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


def test_bom_crlf_blank_lines_and_a_missing_last_newline() -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n\t\n{"prompt": "\xe2\x80\xa8"}'
    reader = RowReader(io.BytesIO(data), where="in")
    rows = list(reader)
    assert [(type(row), row.index, row.line) for row in rows] == [(Row, 0, 1), (Row, 1, 5)]
    assert reader.blank_lines == 3


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
    reader = RowReader(stream, where="in", limit=3)
    assert len(list(reader)) == 3
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
def test_files_of_another_kind_are_named(tmp_path: Path, start: bytes, kind: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(start + b"rest")
    with open_input(str(path)) as stream, pytest.raises(InputError, match=f"in: this is a {kind} file"):
        ReadAhead(RowReader(stream, where="in")).require_first()


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such input file"), open_input(str(tmp_path / "missing")):
        pass
    with pytest.raises(InputError, match="cannot be read"), open_input(str(tmp_path)):
        pass


def test_lines_are_counted_for_the_bar(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n  \nb")
    assert count_lines(str(path)) == 2
    assert count_lines(str(path), limit=1) == 1
    assert count_lines("-") is None
    assert count_lines(os.devnull) is None


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_input_is_noticed_before_anything_else(data: bytes) -> None:
    source = ReadAhead(RowReader(io.BytesIO(data), where="in"))
    with pytest.raises(InputError, match="no rows"):
        source.require_first()


def test_reading_ahead_loses_nothing_and_ends() -> None:
    data = b"".join(b'{"prompt": "%d"}\n' % i for i in range(1000))
    source = ReadAhead(RowReader(io.BytesIO(data), where="in"))
    source.require_first()
    rows = []
    while not source.exhausted:
        row = source.get(timeout=1.0)
        if row is not None:
            rows.append(row)
    assert [row.index for row in rows] == list(range(1000))
    assert source.get(timeout=0.0) is None


class _Endless(io.RawIOBase):
    """Lines without end; counts those that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __next__(self) -> bytes:
        self.count += 1
        return b'{"prompt": "x"}\n'


def test_reading_ahead_is_bounded_and_can_be_called_off() -> None:
    stream = _Endless()
    source = ReadAhead(RowReader(stream, where="in"))  # type: ignore[arg-type]
    source.require_first()
    threading.Event().wait(0.05)
    assert stream.count < 200
    source.close()
    source._thread.join(timeout=5.0)
    assert not source._thread.is_alive()


class _Broken(io.RawIOBase):
    """One line, then the disk is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [b'{"prompt": "x"}\n']

    def __next__(self) -> bytes:
        if self.lines:
            return self.lines.pop()
        raise OSError(5, "Input/output error")


def test_an_input_that_breaks_says_so_in_its_place() -> None:
    source = ReadAhead(RowReader(_Broken(), where="in"))  # type: ignore[arg-type]
    source.require_first()
    assert isinstance(source.get(timeout=1.0), Row)
    with pytest.raises(InputError, match="Input/output error"):
        source.get(timeout=5.0)
    assert source.exhausted
