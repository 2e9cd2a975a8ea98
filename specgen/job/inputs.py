"""From a recipe's input section to lines: which files there are, of what format, and how each is read, lazily.

Knows files, globs, compression, CSV, Parquet, Arrow and datasets. Does not know ids or what a row means. A line of a
table is a row's number, from 1; of CSV, the line its row begins in.
"""

import base64
import csv
import glob
import gzip
import io
import itertools
import math
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specgen import checks
from specgen.errors import InputError, RowError
from specgen.job.readers import BadRow, Line, RowReader, jsonl_lines
from specgen.model_path import HUB_ID
from specgen.recipe import InputSection

_FORMATS = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_PACKED = (".gz", ".zst")
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
_TABLE_BATCH = 256  # rows of a table in memory at once
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass over an input found: how many rows there are, and the messages of ids that are there twice."""

    rows: int
    blank_lines: int
    duplicates: list[str]


class Input:
    """The rows that a recipe names. Each `rows` reads from the start, which stdin and pipes allow once.

    can_be_read_twice: whether `scan` is possible. is_batch: whether this is an OpenAI batch file.
    """

    def __init__(self, section: InputSection) -> None:
        """Find the files, and look at the first line (which waits for one on stdin).

        Raises: InputError if one is missing or cannot be read.
        """
        self.section = section
        self.name = section.name
        found = (source for path in section.paths for source in _sources_of(path, section))
        self.sources = list(dict.fromkeys(found))  # overlapping globs name a file once
        if len(self.sources) > 1 and any(source.path == "-" for source in self.sources):
            raise InputError("stdin is an input of its own: it cannot be one of several", where=self.name)
        self.can_be_read_twice = all(_is_rewindable(source, section) for source in self.sources)
        self._begun: Iterator[Line] | None = None
        self.is_batch = section.format == "openai-batch"
        if section.format == "auto":
            self.is_batch = self._begins_with_a_request()

    @property
    def files(self) -> list[str]:
        """The paths that are on this machine."""
        return [source.path for source in self.sources if source.path != "-" and os.path.exists(source.path)]

    @property
    def id_column(self) -> str:
        """The column that holds the user's ids."""
        return "custom_id" if self.is_batch else self.section.id

    def rows(self, *, unique_ids: bool) -> RowReader:
        """Return a reader of all rows; see `RowReader` for `unique_ids`."""
        lines, self._begun = self._begun or self._lines(), None
        return self._reader(lines, unique_ids=unique_ids)

    def scan(self) -> Scan:
        """Read everything once, before the run: for the number of rows, and ids that are there twice.

        Raises: InputError if the input breaks.
        """
        reader = self._reader(self._lines(only_if=f'"{self.id_column}"'.encode()), unique_ids=True)
        duplicates = [str(row.error) for row in reader if isinstance(row, BadRow) and row.error.code == "duplicate_id"]
        return Scan(reader.rows, reader.blank_lines, duplicates)

    def _reader(self, lines: Iterator[Line], *, unique_ids: bool) -> RowReader:
        limit = self.section.limit
        return RowReader(lines, where=self.name, id_column=self.id_column, limit=limit, unique_ids=unique_ids)

    def _begins_with_a_request(self) -> bool:
        """Whether the first line that is not blank is a request of an OpenAI batch file."""
        lines, looked_at = self._lines(), []
        for line in lines:
            looked_at.append(line)
            if line.data is not None or line.error is not None:
                break
        if not self.can_be_read_twice:
            self._begun = itertools.chain(looked_at, lines)
        data = looked_at[-1].data if looked_at else None
        return data is not None and data.keys() >= _BATCH_KEYS

    def _lines(self, only_if: bytes | None = None) -> Iterator[Line]:
        several = len(self.sources) > 1
        for source in self.sources:
            file = source.path if several else None
            try:
                yield from _READERS[source.format](source, self.section, file, only_if)
            except OSError as error:
                what = error.strerror or str(error)
                raise InputError(f"reading the input failed: {what}", where=source.name) from error
            except (EOFError, zlib.error) as error:
                raise InputError(f"the compressed input is damaged: {error}", where=source.name) from error


class GivenRows:
    """Rows that a program gives, in the place of an `Input`: objects, or texts to be continued."""

    name = "the rows given"
    can_be_read_twice = False
    is_batch = False

    def __init__(self, rows: Iterable[Mapping[str, Any] | str], section: InputSection) -> None:
        self._rows = rows
        self._section = section
        self.id_column = section.id

    def rows(self, *, unique_ids: bool) -> RowReader:
        """Return a reader of all rows; see `RowReader` for `unique_ids`."""
        section = self._section
        return RowReader(
            self._lines(), where=self.name, id_column=section.id, limit=section.limit, unique_ids=unique_ids
        )

    def scan(self) -> Scan:
        """Raises: InputError: rows that are given can be read once."""
        raise InputError("they can be read only once", where=self.name)

    def _lines(self) -> Iterator[Line]:
        for number, row in enumerate(self._rows, start=1):
            if isinstance(row, str):
                yield Line(number, {self._section.prompt: row})
            elif isinstance(row, Mapping):
                yield Line(number, {str(name): _plain(value) for name, value in row.items()})
            else:
                error = RowError(f"a row must be an object or a text, not {checks.shown(row)}", code="not_an_object")
                yield Line(number, None, error, repr(row).encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class _Source:
    """One file, or stdin, or a dataset, and how it is read."""

    path: str
    format: str

    @property
    def name(self) -> str:
        return "stdin" if self.path == "-" else self.path


def duplicates_error(scan: Scan, name: str) -> InputError:
    """Return the error of an input with ids that are there twice."""
    shown = "; ".join(scan.duplicates[:_MAX_SHOWN])
    more = f"; and {len(scan.duplicates) - _MAX_SHOWN:,} more" if len(scan.duplicates) > _MAX_SHOWN else ""
    return InputError(shown + more, where=name, hint="input.duplicate_ids=keep runs them all as rows of their own")


def _sources_of(path: str, section: InputSection) -> Iterator[_Source]:
    if path == "-":
        if sys.stdin is None:
            raise InputError("the rows are to come from stdin, which is closed")
        yield _Source(path, "csv" if section.format == "csv" else "jsonl")
        return
    if section.format == "dataset" or os.path.isdir(path):
        yield _Source(path, "dataset")
        return
    found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not found:
        if section.format == "auto" and HUB_ID.fullmatch(path) and not Path(path).suffix:
            yield _Source(path, "dataset")
            return
        raise InputError("there is no such input file", where=path)
    for name in found:
        if os.path.isdir(name):
            raise InputError("this is a folder among files", where=name, hint="input.format=dataset reads one folder")
        if not os.access(name, os.R_OK):
            raise InputError("the input cannot be read: Permission denied", where=name)
        yield _Source(name, _format_of(name, section))


def _format_of(name: str, section: InputSection) -> str:
    if section.format == "openai-batch":
        return "jsonl"
    if section.format != "auto":
        return section.format
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return _FORMATS.get(suffix, "jsonl")


def _is_rewindable(source: _Source, section: InputSection) -> bool:
    if source.format == "dataset":
        return not section.streaming
    return source.path != "-" and stat.S_ISREG(os.stat(source.path).st_mode)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Yield the bytes of a file, unpacked, or of stdin."""
    if path == "-":
        # A reader of our own on descriptor 0: a thread that waits in it does not hold sys.stdin's lock at exit. It is
        # never closed, since closing waits for that thread.
        try:
            stdin = open(0, "rb", closefd=False)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"stdin cannot be read: {error.strerror}") from None
        yield stdin
    elif path.lower().endswith(".gz"):
        with gzip.open(path) as unpacked:
            yield unpacked  # type: ignore[misc]
    elif path.lower().endswith(".zst"):
        zstandard = _library("zstandard", "zst", path)
        with open(path, "rb") as stream:
            reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
            try:
                yield io.BufferedReader(reader, 1 << 16)
            except zstandard.ZstdError as error:
                raise InputError(f"the compressed input is damaged: {error}", where=path) from None
    else:
        with open(path, "rb") as stream:
            yield stream


def _library(name: str, extra: str, where: str) -> Any:
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        top = name.split(".")[0]
        raise InputError(
            f"reading this needs the package {top}", where=where, hint=f"pip install 'specgen[{extra}]'"
        ) from None


def _read_jsonl(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    with _opened(source.path) as stream:
        yield from jsonl_lines(stream, where=source.name, file=file, only_if=only_if)


def _read_csv(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    """Every value is a text; an empty cell is null. A row with too many or too few cells is that row's error."""
    csv.field_size_limit(2**31 - 1)
    with _opened(source.path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        try:
            rows = csv.reader(text, strict=True)
            header: list[str] | None = None
            while True:
                number = rows.line_num + 1
                try:
                    cells = next(rows, None)
                except csv.Error as error:
                    yield Line(number, None, RowError(f"the row is not CSV: {error}", code="bad_csv"), b"", file)
                    continue
                if cells is None:
                    return
                if header is None and cells:
                    header = _checked_header(cells, source)
                elif not cells:
                    yield Line(number, file=file)
                else:
                    assert header is not None
                    yield _csv_line(number, header, cells, file)
        finally:
            text.detach()


def _checked_header(cells: list[str], source: _Source) -> list[str]:
    if len(set(cells)) != len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise InputError(f"the CSV header names {checks.shown(twice)} twice", where=f"{source.name}:1")
    return cells


def _csv_line(number: int, header: list[str], cells: list[str], file: str | None) -> Line:
    raw = ",".join(cells).encode("utf-8", "surrogateescape")
    if any("\udc80" <= char <= "\udcff" for cell in cells for char in cell):
        return Line(number, None, RowError("the line is not UTF-8", code="bad_utf8"), raw, file)
    if len(cells) != len(header):
        message = f"the row has {len(cells)} cells, the header {len(header)}"
        return Line(number, None, RowError(message, code="bad_csv"), raw, file)
    return Line(number, {name: cell or None for name, cell in zip(header, cells, strict=True)}, file=file)


def _read_parquet(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    parquet = _library("pyarrow.parquet", "parquet", source.path)
    with _pyarrow_errors(source), parquet.ParquetFile(source.path) as table:
        yield from _table_lines(table.iter_batches(batch_size=_TABLE_BATCH), file)


def _read_arrow(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    pyarrow = _library("pyarrow", "parquet", source.path)
    with _pyarrow_errors(source), pyarrow.memory_map(source.path) as mapped:
        try:
            reader = pyarrow.ipc.open_file(mapped)
            batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            batches = pyarrow.ipc.open_stream(mapped)
        yield from _table_lines(_in_slices(batches), file)


def _in_slices(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, _TABLE_BATCH):
            yield batch.slice(start, _TABLE_BATCH)


@contextmanager
def _pyarrow_errors(source: _Source) -> Iterator[None]:
    pyarrow = _library("pyarrow", "parquet", source.path)
    try:
        yield
    except pyarrow.ArrowException as error:
        raise InputError(f"this is not a whole {source.format} file: {error}", where=source.path) from None


def _table_lines(batches: Iterable[Any], file: str | None) -> Iterator[Line]:
    number = 0
    for batch in batches:
        for data in batch.to_pylist():
            number += 1
            yield Line(number, {name: _plain(value) for name, value in data.items()}, file=file)


def _read_dataset(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    datasets = _library("datasets", "datasets", source.path)
    try:
        if os.path.isfile(os.path.join(source.path, "state.json")):
            rows = datasets.load_from_disk(source.path)
        elif os.path.isfile(os.path.join(source.path, "dataset_dict.json")):
            rows = datasets.load_from_disk(source.path)[section.split]
        else:
            rows = datasets.load_dataset(source.path, section.subset, split=section.split, streaming=section.streaming)
    except Exception as error:  # the library raises its own, the hub's and the system's errors alike
        cause = " ".join(str(error).split())[:300]
        hint = "is there a file or folder of that name, is the id right, is the network there?"
        raise InputError(f"the dataset cannot be had: {cause}", where=source.path, hint=hint) from error
    for number, data in enumerate(rows, start=1):
        yield Line(number, {str(name): _plain(value) for name, value in data.items()}, file=file)


def _plain(value: Any) -> Any:
    """Return a table's value as JSON has it: NaN is null, bytes are base64, dates and decimals their texts."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):  # a struct has every field in every row: null is "not given" there
        return {str(name): _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "tolist"):  # numpy
        return _plain(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_READERS: dict[str, Callable[[_Source, InputSection, str | None, bytes | None], Iterator[Line]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "dataset": _read_dataset,
}
