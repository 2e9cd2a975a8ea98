"""JSONL rows, one at a time, from a file or a pipe: every non-blank line becomes a `Row` or a `BadRow`.

Knows bytes, lines and JSON; a broken line is a BadRow and the next one is read as if nothing had happened. Does not
know what a row means (`prompts.py`), except its id.

What is decided for odd input: a UTF-8 BOM is skipped; CRLF ends a line like LF; blank lines are skipped and counted;
bad UTF-8, a NUL or other raw control character, cut JSON, NaN, Infinity, numbers beyond float64, a key given twice and
a line that is no object are each that line's error.
"""

import hashlib
import itertools
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from specgen import checks
from specgen.errors import InputError, RowError
from specgen.job.digest_map import DigestMap

# Rows that are read ahead of the engine: enough to hide a slow pipe, few enough to keep memory flat.
_READ_AHEAD = 128
_FOREIGN_STARTS = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"(\xb5/\xfd": "Zstandard",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is an object. index: counts rows from 0. line: of the file, from 1. data: the object as read."""

    index: int
    line: int
    id: str | int | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot be run. id and data are there if the line could be read so far."""

    index: int
    line: int
    error: RowError
    id: str | int | None = None
    data: dict[str, Any] | None = None


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Yield the bytes of a JSONL file, or of stdin for `-`.

    Raises: InputError if there is no such file, or stdin is closed.
    """
    if path == "-":
        if sys.stdin is None:
            raise InputError("the rows are to come from stdin, which is closed")
        # A reader of our own on descriptor 0: a thread that waits in it does not hold sys.stdin's lock at exit. It is
        # never closed, since closing waits for that thread.
        try:
            stdin = open(0, "rb", closefd=False)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"stdin cannot be read: {error.strerror}") from None
        yield stdin
        return
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        raise InputError("there is no such input file", where=path) from None
    except OSError as error:
        raise InputError(f"the input cannot be read: {error.strerror}", where=path) from None
    with stream:
        yield stream


def name_of(path: str) -> str:
    """Return what an input is called in messages."""
    return "stdin" if path == "-" else path


def no_rows(where: str) -> InputError:
    """Return the error of an input without a row."""
    return InputError("the input has no rows", where=where)


def count_lines(path: str, limit: int | None = None) -> int | None:
    """Return how many non-blank lines a file has, `limit` at most: a bound for the progress bar.

    It reads the file once more for that, as far as `limit`. None for stdin, pipes and whatever else has no end yet.
    """
    if path == "-" or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as stream:
            return sum(1 for _ in itertools.islice(filter(bytes.strip, stream), limit))
    except OSError:  # whoever reads the rows says so
        return None


class RowReader:
    """Iterates over the rows of a binary stream, at most `limit` of them.

    blank_lines: lines skipped so far. where: the name of the input in messages. Remembers every id, in at most 48 bytes
    each (`DigestMap`).
    """

    def __init__(self, stream: BinaryIO, *, where: str, id_column: str = "id", limit: int | None = None) -> None:
        self.where = where
        self.blank_lines = 0
        self._stream = stream
        self._id_column = id_column
        self._limit = limit
        self._lines_of_ids = DigestMap()  # the line where each id was first seen, by 8 bytes of its hash

    def __iter__(self) -> Iterator[Row | BadRow]:
        """Yield the rows in file order.

        Raises: InputError if the stream itself breaks, or is plainly of another kind (gzip, Parquet, UTF-16, …).
        """
        index = 0
        try:
            for number, raw in enumerate(self._stream, start=1):
                if number == 1:
                    self._refuse_foreign(raw)
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if not line.strip():
                    self.blank_lines += 1
                    continue
                yield self._row(index, number, line)
                index += 1
                if index == self._limit:
                    return
        except OSError as error:
            raise InputError(f"reading the input failed: {error.strerror}", where=self.where) from error

    def _refuse_foreign(self, start: bytes) -> None:
        for magic, kind in _FOREIGN_STARTS.items():
            if start.startswith(magic):
                raise InputError(f"this is a {kind} file", where=self.where, hint="this version reads JSONL in UTF-8")

    def _row(self, index: int, number: int, line: bytes) -> Row | BadRow:
        try:
            data = _parse_object(line)
        except RowError as error:
            return BadRow(index, number, error)
        try:
            row_id = self._checked_id(data.get(self._id_column), number)
        except RowError as error:
            shown = data.get(self._id_column)
            plain = shown if isinstance(shown, (str, int)) and not isinstance(shown, bool) else None
            return BadRow(index, number, error, plain, data)
        return Row(index, number, row_id, data)

    def _checked_id(self, row_id: object, number: int) -> str | int | None:
        if row_id is None:
            return None
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)) or row_id == "":
            raise RowError(f"{self._id_column} must be a text or an integer, not {checks.shown(row_id)}", code="bad_id")
        data = f"{type(row_id).__name__}:{row_id}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, digest_size=8).digest()
        first = self._lines_of_ids.setdefault(digest, number)
        if first != number:
            raise RowError(
                f"{self._id_column} {checks.shown(row_id)} of line {number} was given before, in line {first}",
                code="duplicate_id",
            )
        return row_id


class ReadAhead:
    """Reads rows in a thread of its own, a bounded number ahead, so that a slow pipe holds nobody up.

    `get` waits at most so long; `exhausted` is true once the last row was handed out.
    """

    def __init__(self, reader: RowReader) -> None:
        self.reader = reader
        self.exhausted = False
        self._queue: queue.Queue[Row | BadRow | Exception | None] = queue.Queue(_READ_AHEAD)
        self._first: Row | BadRow | None = None
        self._closed = threading.Event()
        # A daemon: a read from a silent terminal cannot be called off, and must not keep the process alive.
        self._thread = threading.Thread(target=self._read, name="row-reader", daemon=True)
        self._thread.start()

    def require_first(self) -> None:
        """Wait until there is a row, so that an empty input is noticed before a model is loaded.

        Raises: InputError if there is none.
        """
        while self._first is None and not self.exhausted:
            self._first = self.get(timeout=0.2)
        if self._first is None:
            raise no_rows(self.reader.where)

    def get(self, timeout: float) -> Row | BadRow | None:
        """Return the next row, None if none came within `timeout` seconds or there are no more.

        Raises: whatever ended the reading, in its place among the rows.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self.exhausted:
            return None
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        if item is None or isinstance(item, Exception):
            self.exhausted = True
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Stop reading ahead; the thread ends by itself at its next row."""
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _read(self) -> None:
        last: Exception | None = None
        try:
            for row in self.reader:
                if not self._put(row):
                    return
        except Exception as error:
            last = error
        self._put(last)

    def _put(self, item: Row | BadRow | Exception | None) -> bool:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.2)
                return True
        return False


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")  # JSON's columns would start anew behind a line end
    except UnicodeDecodeError as error:
        raise RowError(f"the line is not UTF-8: {error.reason} at byte {error.start}", code="bad_utf8") from None
    try:
        data = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_keys
        )
    except json.JSONDecodeError as error:
        raise RowError(f"the line is not JSON: {error.msg} at column {error.colno}", code="bad_json") from None
    except RecursionError:
        raise RowError("the line is not usable JSON: nested too deeply", code="bad_json") from None
    except ValueError as error:
        raise RowError(f"the line is not usable JSON: {error}", code="bad_json") from None
    if not isinstance(data, dict):
        raise RowError(f"the line must be a JSON object, not {checks.shown(data)}", code="not_an_object")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {checks.shown(twice)} is given twice")
    return data
