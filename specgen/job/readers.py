"""Rows, one at a time: every line of an input that is not blank becomes a `Row` or a `BadRow`.

Knows bytes, lines, JSON and ids; a broken line is a BadRow and the next one is read as if nothing had happened. Does
not know files and formats (`inputs.py`), nor what a row means (`plan.py`).

What is decided for odd JSONL: a UTF-8 BOM is skipped; CRLF ends a line like LF; blank lines are skipped and counted;
bad UTF-8, a NUL or other raw control character, cut JSON, NaN, Infinity, numbers beyond float64, a key given twice,
lists or objects nested more than 100 deep and a line that is no object are each that line's error.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from specgen import checks
from specgen.errors import InputError, RowError
from specgen.job.digest_map import DigestMap

# How a file begins that has no lines of text, what it is, and what to do.
_FOREIGN_STARTS = {
    b"\x1f\x8b": ("gzip", "gzip -dc unpacks it, as does a name that ends in .gz"),
    b"(\xb5/\xfd": ("Zstandard", "zstd -dc unpacks it, as does a name that ends in .zst"),
    b"PAR1": ("Parquet", "input.format=parquet reads it, from a file"),
    b"ARROW1": ("Arrow", "input.format=arrow reads it, from a file"),
    b"PK\x03\x04": ("zip", "unpack it first"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 makes it readable"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 makes it readable"),
}
# How a JSON file begins that is no JSONL: a lone bracket, or a list of objects.
_WHOLE_JSON = re.compile(rb"\s*(?:[\[{]\s*$|\[\s*\{)")
_START_BYTES = 1 << 16  # tell what a file is; a list of objects on one line may be the whole of it


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is an object. index: counts rows from 0. line: of its file, from 1. data: the object as read.

    file: its name, if the input has several.
    """

    index: int
    line: int
    id: str | int | None
    data: dict[str, Any]
    file: str | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot be run. id and data are there if the line could be read so far, raw if it could not."""

    index: int
    line: int
    error: RowError
    id: str | int | None = None
    data: dict[str, Any] | None = None
    file: str | None = None
    raw: bytes = b""


class Line(NamedTuple):
    """What one line of an input holds: an object, or an error and the bytes it stands for; neither is a blank line."""

    number: int
    data: dict[str, Any] | None = None
    error: RowError | None = None
    raw: bytes = b""
    file: str | None = None


def no_rows(where: str) -> InputError:
    """Return the error of an input without a row."""
    return InputError("the input has no rows", where=where)


class RowReader:
    """Iterates over the rows of an input's lines, at most `limit` of them.

    blank_lines, rows: how many so far. where: the name of the input in messages. unique_ids: an id that was there
    before is its row's error; that takes the memory of a `DigestMap`.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        *,
        where: str,
        id_column: str = "id",
        limit: int | None = None,
        unique_ids: bool = True,
    ) -> None:
        self.where = where
        self.blank_lines = 0
        self.rows = 0
        self._lines = lines
        self._id_column = id_column
        self._limit = limit
        self._places: DigestMap | None = DigestMap() if unique_ids else None  # where each id was first seen
        self._files: list[str | None] = []

    def __iter__(self) -> Iterator[Row | BadRow]:
        """Yield the rows in the input's order.

        Raises: InputError if the input itself breaks, or is plainly of another kind (gzip, Parquet, UTF-16, …).
        """
        for line in self._lines:
            if line.data is None and line.error is None:
                self.blank_lines += 1
                continue
            row = self._row(line)
            self.rows += 1
            yield row
            if self.rows == self._limit:
                return

    def _row(self, line: Line) -> Row | BadRow:
        number, data, error, raw, file = line
        if data is None:
            assert error is not None
            return BadRow(self.rows, number, error, file=file, raw=raw)
        row_id = data.get(self._id_column)
        try:
            if row_id is not None:
                self._check_id(row_id, number, file)
            if error is not None:
                raise error
        except RowError as bad:
            plain = row_id if isinstance(row_id, (str, int)) and not isinstance(row_id, bool) else None
            return BadRow(self.rows, number, bad, plain, data, file)
        return Row(self.rows, number, row_id, data, file)

    def _check_id(self, row_id: object, number: int, file: str | None) -> None:
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)) or row_id == "":
            raise RowError(f"{self._id_column} must be a text or an integer, not {checks.shown(row_id)}", code="bad_id")
        if self._places is None:
            return
        if not self._files or self._files[-1] != file:  # they come one after the other
            self._files.append(file)
        data = f"{type(row_id).__name__}:{row_id}".encode("utf-8", "surrogatepass")
        place = number << 16 | min(len(self._files) - 1, 0xFFFF)
        first = self._places.setdefault(hashlib.blake2b(data, digest_size=8).digest(), place)
        if first != place:
            first_file = self._files[first & 0xFFFF]
            here, there = (f" of {name}" if name else "" for name in (file, first_file))
            raise RowError(
                f"{self._id_column} {checks.shown(row_id)} of line {number}{here} was given before, in line"
                f" {first >> 16}{there}",
                code="duplicate_id",
            )


def jsonl_lines(
    stream: BinaryIO, *, where: str, file: str | None = None, only_if: bytes | None = None
) -> Iterator[Line]:
    """Yield the lines of JSONL. only_if: lines without these bytes are not parsed and give an empty object.

    Raises: InputError if the stream is plainly of another kind.
    """
    first = stream.readline(_START_BYTES)
    refuse_foreign(first, "JSONL", where)
    first = first.removeprefix(b"\xef\xbb\xbf")
    if _WHOLE_JSON.match(first):
        raise InputError(
            "this is JSON over several lines, or an array of objects, and is read as JSONL, an object a line",
            where=where,
            hint="jq -c '.[]' makes an array JSONL",
        )
    if first and not first.endswith(b"\n"):
        first += stream.readline()
    for number, raw in enumerate(itertools.chain([first] if first else [], stream), start=1):
        if not raw.strip():
            yield Line(number, file=file)
        elif only_if is not None and only_if not in raw and b"\\u" not in raw:
            yield Line(number, {}, file=file)
        else:
            try:
                yield Line(number, _parse_object(raw), file=file)
            except RowError as error:
                yield Line(number, None, error, raw, file)


def refuse_foreign(start: bytes, kind: str, where: str) -> None:
    """Return if a file that is read as `kind` may be lines of text. start: its first bytes. Raises: InputError."""
    for foreign, (name, hint) in _FOREIGN_STARTS.items():
        if start.startswith(foreign):
            raise InputError(f"this is a {name} file and is read as {kind}", where=where, hint=hint)


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"the line is not UTF-8: {error.reason} at byte {error.start}", code="bad_utf8") from None
    data = parse_json(text, "the line", code="bad_json")
    if not isinstance(data, dict):
        raise RowError(f"the line must be a JSON object, not {checks.shown(data)}", code="not_an_object")
    return data


def parse_json(text: str, what: str, *, code: str) -> Any:
    """Return the value that a text is as strict JSON. Raises: RowError with `code`, which says that `what` is none."""
    too_deep = f"{what} is not usable JSON: nested more than {checks.MAX_DEPTH} deep"
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise RowError(f"{what} is not JSON: {reason} at column {error.pos + 1}", code=code) from None
    except RecursionError:
        raise RowError(too_deep, code=code) from None
    except ValueError as error:
        raise RowError(f"{what} is not usable JSON: {error}", code=code) from None
    if text.count("[") + text.count("{") > checks.MAX_DEPTH and checks.is_too_deep(value):
        raise RowError(too_deep, code=code)
    return value


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


# Made once: json.loads with hooks makes a decoder for every line.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_keys)
