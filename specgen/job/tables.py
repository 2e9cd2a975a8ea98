"""Lines of tables: CSV, Parquet, Arrow and Hugging Face datasets, each read a piece at a time.

Knows formats, and how a table's values become JSON's. Does not know which files there are. The number of a line is its
row's, from 1; of CSV, the line its row begins in.
"""

import base64
import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specgen import checks
from specgen.errors import InputError, RowError
from specgen.job.readers import Line
from specgen.job.unpack import library, opened
from specgen.recipe import InputSection

_TABLE_BATCH = 256  # rows of a table in memory at once


def csv_lines(path: str, name: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of CSV: texts, null for an empty cell. Too many or too few cells are that row's error.

    Raises: InputError for a header that cannot be used, and what `opened` raises.
    """
    csv.field_size_limit(2**31 - 1)
    with opened(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        try:
            rows = csv.reader(text, strict=True)
            header: list[str] | None = None
            while True:
                number = rows.line_num + 1
                try:
                    cells = next(rows, None)
                except csv.Error as error:
                    if header is None:
                        raise InputError(f"the CSV header cannot be read: {error}", where=f"{name}:{number}") from None
                    yield Line(number, None, RowError(f"the row is not CSV: {error}", code="bad_csv"), b"", file)
                    continue
                if cells is None:
                    return
                if header is None and cells:
                    header = _checked_header(cells, name)
                elif not cells:
                    yield Line(number, file=file)
                else:
                    assert header is not None
                    yield _csv_line(number, header, cells, file)
        finally:
            text.detach()


def _checked_header(cells: list[str], name: str) -> list[str]:
    if len(set(cells)) != len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise InputError(f"the CSV header names {checks.shown(twice)} twice", where=f"{name}:1")
    if any(map(_is_not_utf8, cells)):
        raise InputError("the CSV header is not UTF-8", where=f"{name}:1", hint="iconv makes it so")
    if len(cells) == 1 and (other := next((mark for mark in ";\t|" if mark in cells[0]), None)):
        raise InputError(
            f"the CSV header is one cell, {checks.shown(cells[0])}, which has {checks.shown(other)} in it",
            where=f"{name}:1",
            hint="cells are separated by commas",
        )
    return cells


def _is_not_utf8(text: str) -> bool:
    """Whether bytes were read that are none; they stand in the text as half surrogate pairs."""
    return any("\udc80" <= char <= "\udcff" for char in text)


def _csv_line(number: int, header: list[str], cells: list[str], file: str | None) -> Line:
    raw = ",".join(cells).encode("utf-8", "surrogateescape")
    if any(map(_is_not_utf8, cells)):
        return Line(number, None, RowError("the line is not UTF-8", code="bad_utf8"), raw, file)
    if len(cells) != len(header):
        message = f"the row has {len(cells)} cells, the header {len(header)}"
        return Line(number, None, RowError(message, code="bad_csv"), raw, file)
    return Line(number, {name: cell or None for name, cell in zip(header, cells, strict=True)}, file=file)


def parquet_lines(path: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of a Parquet file. Raises: InputError."""
    parquet = library("pyarrow.parquet", "parquet", path)
    with _pyarrow_errors(path, "Parquet"), parquet.ParquetFile(path) as table:
        yield from _table_lines(table.iter_batches(batch_size=_TABLE_BATCH), file)


def arrow_lines(path: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of an Arrow file or stream. Raises: InputError."""
    pyarrow = library("pyarrow", "parquet", path)
    with _pyarrow_errors(path, "Arrow"), pyarrow.memory_map(path) as mapped:
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
def _pyarrow_errors(path: str, kind: str) -> Iterator[None]:
    pyarrow = library("pyarrow", "parquet", path)
    try:
        yield
    except pyarrow.ArrowException as error:
        raise InputError(f"this is not a whole {kind} file: {error}", where=path) from None


def _table_lines(batches: Iterable[Any], file: str | None) -> Iterator[Line]:
    number = 0
    for batch in batches:
        for data in _objects_of(batch):
            number += 1
            if isinstance(data, RowError):
                yield Line(number, None, data, str(number).encode(), file)
            else:
                yield Line(number, {name: plain(value) for name, value in data.items()}, file=file)


def _objects_of(batch: Any) -> Iterator[dict[str, Any] | RowError]:
    """Yield a batch's rows, and an error for one that Python cannot hold: text that is not UTF-8, a moment too fine."""
    try:
        whole = batch.to_pylist()
    except (ValueError, OverflowError):
        for place in range(batch.num_rows):
            try:
                yield from batch.slice(place, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield RowError(f"a value of the row cannot be read: {error}", code="bad_value")
    else:
        yield from whole


def dataset_lines(path: str, section: InputSection, file: str | None) -> Iterator[Line]:
    """Yield the rows of a dataset: a folder that `datasets` saved or knows to read, or a hub id. Raises: InputError."""
    datasets = library("datasets", "datasets", path)
    try:
        if os.path.isfile(os.path.join(path, "state.json")):
            rows = datasets.load_from_disk(path)
        elif os.path.isfile(os.path.join(path, "dataset_dict.json")):
            rows = datasets.load_from_disk(path)[section.split]
        else:
            rows = datasets.load_dataset(path, section.subset, split=section.split, streaming=section.streaming)
        for number, data in enumerate(rows, start=1):
            yield Line(number, {str(name): plain(value) for name, value in data.items()}, file=file)
    except Exception as error:  # the library raises its own, the hub's and the system's errors alike
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        hint = "is there a file or folder of that name, is the id right, is the network there?"
        raise InputError(f"the dataset cannot be had: {cause}", where=path, hint=hint) from error


def plain(value: Any, *, with_nulls: bool = False) -> Any:
    """Return a value as JSON has it: NaN is null, bytes are base64, dates and decimals their texts.

    with_nulls: whether an object keeps its nulls; a table's struct has every field in every row: null is "not given".
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = value.items() if with_nulls else ((name, item) for name, item in value.items() if item is not None)
        return {str(name): plain(item, with_nulls=with_nulls) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [plain(item, with_nulls=with_nulls) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
