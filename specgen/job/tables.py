"""Lines of tables: CSV, Parquet, Arrow and Hugging Face datasets, each read a piece at a time.

Knows formats, and how a table's values become JSON's. Does not know which files there are. The number of a line is its
row's, from 1; of CSV, the line its row begins in.
"""

import base64
import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specgen import checks
from specgen.errors import InputError, RowError
from specgen.job.contents import Base64
from specgen.job.readers import Line, refuse_foreign
from specgen.job.unpack import opened, optional_module
from specgen.recipe_sections import InputSection

_TABLE_BATCH = 256  # rows of a table in memory at once
_PARQUET_BUFFER = 1 << 20  # bytes of a column that are read at once; without it, a whole row group is
_LONGEST_CELL = 1 << 24  # characters of CSV: how much a quote that is not closed can swallow


def csv_lines(path: str, name: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of CSV: texts, null for an empty cell. Too many or too few cells, or a NUL, are that row's error.

    Raises: InputError for a header that cannot be used, and what `opened` raises.
    """
    csv.field_size_limit(_LONGEST_CELL)
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
                    yield Line(number, None, _csv_error(error, number, rows.line_num), f"{number}".encode(), file)
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


def _csv_error(error: csv.Error, first_line: int, last_line: int) -> RowError:
    """Return the error of a row that may have swallowed lines."""
    reason = "a quote is not closed" if "end of data" in str(error) else str(error)
    swallowed = f"; lines {first_line} to {last_line} are lost to it" if last_line > first_line else ""
    return RowError(f"the row is not CSV: {reason}{swallowed}", code="bad_csv")


def _checked_header(cells: list[str], name: str) -> list[str]:
    raw = _bytes_of(cells)
    refuse_foreign(raw, "CSV", name)
    _check_names(cells, "the CSV header", f"{name}:1")
    if not _is_utf8(raw):
        raise InputError("the CSV header is not UTF-8", where=f"{name}:1", hint="iconv makes it so")
    if len(cells) == 1 and (other := next((mark for mark in ";\t|" if mark in cells[0]), None)):
        raise InputError(
            f"the CSV header is one cell, {checks.shown(cells[0])}, which has {checks.shown(other)} in it",
            where=f"{name}:1",
            hint="cells are separated by commas",
        )
    return cells


def _check_names(names: Sequence[str], what: str, where: str) -> None:
    """Raises: InputError if two columns have one name: a row could hold only one of them."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{what} names {checks.shown(twice)} twice", where=where)


def _bytes_of(cells: Sequence[str]) -> bytes:
    """Return what was read; bytes that are no UTF-8 stand in the cells as half surrogate pairs."""
    return ",".join(cells).encode("utf-8", "surrogateescape")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _csv_line(number: int, header: list[str], cells: list[str], file: str | None) -> Line:
    raw = _bytes_of(cells)
    if not _is_utf8(raw):
        return Line(number, None, RowError("the line is not UTF-8", code="bad_utf8"), raw, file)
    if b"\0" in raw:
        return Line(number, None, RowError("the row holds a NUL", code="bad_csv"), raw, file)
    if len(cells) != len(header):
        message = f"the row has {len(cells)} cells, the header {len(header)}"
        return Line(number, None, RowError(message, code="bad_csv"), raw, file)
    return Line(number, {name: cell or None for name, cell in zip(header, cells, strict=True)}, file=file)


def parquet_lines(path: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of a Parquet file. Raises: InputError."""
    parquet = optional_module("pyarrow.parquet", "parquet", path)
    with (
        _pyarrow_errors(path, "Parquet"),
        parquet.ParquetFile(path, pre_buffer=False, buffer_size=_PARQUET_BUFFER) as table,
    ):
        _check_names(table.schema_arrow.names, "the table", path)
        yield from _table_lines(table.iter_batches(batch_size=_TABLE_BATCH), file)


def arrow_lines(path: str, file: str | None) -> Iterator[Line]:
    """Yield the rows of an Arrow file or stream. Raises: InputError."""
    pyarrow = optional_module("pyarrow", "parquet", path)
    with _pyarrow_errors(path, "Arrow"), pyarrow.memory_map(path) as mapped:
        try:
            reader = pyarrow.ipc.open_file(mapped)
            batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            batches = reader = pyarrow.ipc.open_stream(mapped)
        _check_names(reader.schema.names, "the table", path)
        yield from _table_lines(_in_slices(batches), file)


def _in_slices(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, _TABLE_BATCH):
            yield batch.slice(start, _TABLE_BATCH)


@contextmanager
def _pyarrow_errors(path: str, kind: str) -> Iterator[None]:
    pyarrow = optional_module("pyarrow", "parquet", path)
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
                yield line_of(number, data, file)


def _objects_of(batch: Any) -> Iterator[dict[str, Any] | RowError]:
    """Yield a batch's rows, and an error for one that Python cannot hold: text that is not UTF-8, a moment too fine, a
    map with a key twice.
    """
    try:
        whole = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):
        for place in range(batch.num_rows):
            try:
                yield from batch.slice(place, 1).to_pylist(maps_as_pydicts="strict")
            except (ValueError, OverflowError, KeyError) as error:
                yield RowError(f"a value of the row cannot be read: {error}", code="bad_value")
    else:
        yield from whole


def dataset_lines(path: str, section: InputSection, file: str | None) -> Iterator[Line]:
    """Yield the rows of a dataset: a folder that `datasets` saved or knows to read, or a hub id. Raises: InputError."""
    datasets = optional_module("datasets", "datasets", path)
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
            rows = _split_of(datasets.load_from_disk(path), path, section)
        else:
            rows = datasets.load_dataset(path, section.subset, split=section.split, streaming=section.streaming)
        for number, data in enumerate(rows, start=1):
            yield line_of(number, data, file)
    except InputError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the system's errors alike
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        is_here = os.path.isdir(path)
        hint = None if is_here else "is there a file or folder of that name, is the id right, is the network there?"
        raise InputError(f"the dataset cannot be had: {cause}", where=path, hint=hint) from error


def _split_of(saved: Any, path: str, section: InputSection) -> Any:
    """Return the split that is asked for of what `datasets` saved, which has no subsets. Raises: InputError."""
    if section.subset is not None:
        raise InputError("input.subset has no effect: a dataset that was saved has none", where=path)
    if not isinstance(saved, Mapping) and section.split == InputSection().split:
        return saved
    splits = saved if isinstance(saved, Mapping) else {str(saved.split or "one without a name"): saved}
    if section.split not in splits:
        known = ", ".join(splits)
        raise InputError(f"the dataset has no split {checks.shown(section.split)}", where=path, hint=f"it has {known}")
    return splits[section.split]


def line_of(number: int, data: Mapping[Any, Any], file: str | None, *, with_nulls: bool = False) -> Line:
    """Return the line of a row's values; one that cannot be held is its error."""
    try:
        return Line(number, {str(name): plain(value, with_nulls=with_nulls) for name, value in data.items()}, file=file)
    except RowError as error:
        return Line(number, None, error, str(number).encode(), file)


def plain(value: Any, *, with_nulls: bool = False, levels: int = checks.MAX_DEPTH) -> Any:
    """Return a value as JSON has it: NaN is null, bytes are base64, dates and decimals their texts.

    with_nulls: whether an object keeps its nulls; a table's struct has every field in every row: null is "not given".

    Raises: RowError if it holds values more than `levels` deep.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if levels == 0:
        raise RowError(f"a value of the row is nested more than {checks.MAX_DEPTH} deep", code="bad_value")
    if isinstance(value, Mapping):
        items = value.items() if with_nulls else ((name, item) for name, item in value.items() if item is not None)
        return {str(name): plain(item, with_nulls=with_nulls, levels=levels - 1) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [plain(item, with_nulls=with_nulls, levels=levels - 1) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return Base64(base64.b64encode(value).decode("ascii"))
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist(), levels=levels - 1)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
