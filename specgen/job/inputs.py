"""From a recipe's input section to lines: which files there are, of what format, and how each is read, lazily.

Knows files, globs and formats by name, and rows that a program gives. Does not know ids or what a row means.
"""

import functools
import glob
import itertools
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen import checks, yaml_lines
from specgen.errors import InputError, RowError
from specgen.job.readers import BadRow, Line, RowReader, jsonl_lines
from specgen.job.tables import arrow_lines, csv_lines, dataset_lines, line_of, parquet_lines
from specgen.job.unpack import opened
from specgen.model_path import HUB_ID
from specgen.recipe_sections import InputSection

_FORMATS = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_PACKED = (".gz", ".zst")
# Names that say something else than JSONL; `input.format` overrules them.
_FOREIGN = (".tsv", ".xls", ".xlsx", ".ods", ".yaml", ".yml", ".xml", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z")
_NEEDS_FILES = ("parquet", "arrow", "dataset")
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
MAX_SHOWN = 5  # rows of one kind that messages name


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass over an input found: how many rows there are and how many ids that were there before, the first of
    them as messages.
    """

    rows: int
    num_duplicates: int
    duplicates: list[str]


class Input:
    """The rows that a recipe names. Each `rows` reads from the start, which stdin and pipes allow once.

    can_be_read_twice: whether `scan` is possible.
    """

    def __init__(self, section: InputSection) -> None:
        """Find the files.

        Raises: InputError if one is missing or cannot be read.
        """
        self.section = section
        self.name = section.name
        found = (source for path in section.paths for source in _sources_of(path, section))
        self.sources = list(dict.fromkeys(found))  # overlapping globs name a file once
        _check_dataset_keys(self.sources, section)
        if len(self.sources) > 1 and any(source.path == "-" for source in self.sources):
            raise InputError("stdin is an input of its own: it cannot be one of several", where=self.name)
        self.can_be_read_twice = all(_is_rewindable(source, section) for source in self.sources)
        self._begun: Iterator[Line] | None = None

    @property
    def files(self) -> list[str]:
        """The paths that are on this machine; - is stdin."""
        return [source.path for source in self.sources if source.path == "-" or os.path.exists(source.path)]

    @property
    def patterns(self) -> list[str]:
        """The paths that stand for all files of a kind."""
        return [path for path in self.section.paths if glob.has_magic(path) and not os.path.exists(path)]

    @functools.cached_property
    def is_batch(self) -> bool:
        """Whether this is an OpenAI batch file: the recipe, or the first line, says so. (On stdin, waits for one.)"""
        if self.section.format != "auto":
            return self.section.format == "openai-batch"
        return self._begins_with_a_request()

    @property
    def id_column(self) -> str:
        """The column that holds the user's ids."""
        return _id_column(self.section, self.is_batch)

    def rows(self, *, unique_ids: bool) -> RowReader:
        """Return a reader of all rows; see `RowReader` for `unique_ids`."""
        id_column = self.id_column  # may begin to read
        lines, self._begun = self._begun or self._lines(), None
        return self._reader(lines, id_column, unique_ids=unique_ids)

    def scan(self) -> Scan:
        """Read everything once, before the run: for the number of rows, and ids that are there twice.

        Raises: InputError if the input breaks.
        """
        id_column = self.id_column
        quoted = json.dumps(id_column, ensure_ascii=False)
        is_plain = quoted == f'"{id_column}"' and "/" not in id_column  # other names are written in several ways
        lines = self._lines(only_if=quoted.encode("utf-8", "surrogatepass") if is_plain else None)
        reader = self._reader(lines, id_column, unique_ids=True)
        num_duplicates, duplicates = 0, []
        for row in reader:
            if isinstance(row, BadRow) and row.error.code == "duplicate_id":
                num_duplicates += 1
                if num_duplicates <= MAX_SHOWN:
                    duplicates.append(str(row.error))
        return Scan(reader.rows, num_duplicates, duplicates)

    def _reader(self, lines: Iterator[Line], id_column: str, *, unique_ids: bool) -> RowReader:
        limit = self.section.limit
        return RowReader(lines, where=self.name, id_column=id_column, limit=limit, unique_ids=unique_ids)

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
                yield from _lines_of(source, self.section, file, only_if)
            except OSError as error:
                what = error.strerror or str(error)
                raise InputError(f"reading the input failed: {what}", where=source.name) from error
            except (EOFError, zlib.error) as error:
                raise InputError(f"the compressed input is damaged: {error}", where=source.name) from error


class GivenRows:
    """Rows that a program gives, in the place of an `Input`: objects, or texts to be continued."""

    name = "the rows given"
    can_be_read_twice = False

    def __init__(self, rows: Iterable[Mapping[str, Any] | str], section: InputSection) -> None:
        """Raises: InputError if they are no rows, one after the other."""
        if isinstance(rows, (str, bytes, Mapping)):
            raise InputError(f"rows must be several, as in a list, not {checks.shown(rows)}", hint="[row] is one")
        if hasattr(rows, "columns"):  # iterating over a table gives its columns, or their names
            hint = "pandas has .to_dict('records'), polars .iter_rows(named=True), pyarrow .to_pylist()"
            raise InputError(f"rows must be objects or texts, not the columns of a {type(rows).__name__}", hint=hint)
        if not isinstance(rows, Iterable):
            raise InputError(f"rows must be several, as in a list, not {checks.shown(rows)}")
        self._rows = rows
        self._section = section
        self.is_batch = section.format == "openai-batch"

    def rows(self, *, unique_ids: bool) -> RowReader:
        """Return a reader of all rows; see `RowReader` for `unique_ids`."""
        section = self._section
        return RowReader(
            self._lines(),
            where=self.name,
            id_column=_id_column(section, self.is_batch),
            limit=section.limit,
            unique_ids=unique_ids,
        )

    def scan(self) -> Scan:
        """Raises: InputError: rows that are given can be read once."""
        raise InputError("they can be read only once", where=self.name)

    def _lines(self) -> Iterator[Line]:
        for number, row in enumerate(self._rows, start=1):
            if isinstance(row, str):
                yield Line(number, {self._section.prompt: row})
            elif isinstance(row, Mapping):
                yield line_of(number, row, None, with_nulls=True)
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


def duplicates_error(number: int, first: Sequence[str], name: str) -> InputError:
    """Return the error of an input with so many ids that were there before; `first`: messages of some of them."""
    num_more = number - len(first)
    shown = "; ".join(first) + (f"; and {num_more:,} more" if num_more else "")
    return InputError(shown, where=name, hint="input.duplicate_ids=keep runs them all as rows of their own")


def _id_column(section: InputSection, is_batch: bool) -> str:
    return "custom_id" if is_batch else section.id


def _sources_of(path: str, section: InputSection) -> Iterator[_Source]:
    if path == "-":
        if sys.stdin is None:
            raise InputError("the rows are to come from stdin, which is closed")
        if section.format in _NEEDS_FILES:
            raise InputError(f"input.format={section.format} is read from files, not from stdin")
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
        if not os.path.exists(name):
            raise InputError("there is no such input file: this is a link to nothing", where=name)
        if not os.access(name, os.R_OK):
            raise InputError("the input cannot be read: Permission denied", where=name)
        yield _Source(name, _format_of(name, section))


def _check_dataset_keys(sources: list[_Source], section: InputSection) -> None:
    """Raises: InputError if keys choose parts of a dataset, and there is none."""
    defaults = InputSection()
    given = [name for name in ("subset", "split", "streaming") if getattr(section, name) != getattr(defaults, name)]
    if given and sources and all(source.format != "dataset" for source in sources):
        raise InputError(
            f"input.{given[0]} has no effect: it is for datasets, and this is a file",
            where=sources[0].name,
            hint=f"leave it out, or --set input.{given[0]}={yaml_lines.dump_scalar(getattr(defaults, given[0]))}",
        )


def _format_of(name: str, section: InputSection) -> str:
    if section.format == "openai-batch":
        return "jsonl"
    if section.format != "auto":
        return section.format
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    if suffix in _FOREIGN:
        raise InputError(
            f"{suffix} files are not read",
            where=name,
            hint="JSONL, CSV, Parquet and Arrow are; if it is one of them, input.format=jsonl, say, tells so",
        )
    return _FORMATS.get(suffix, "jsonl")


def _is_rewindable(source: _Source, section: InputSection) -> bool:
    if source.format == "dataset":
        return not section.streaming
    return source.path != "-" and stat.S_ISREG(os.stat(source.path).st_mode)


def _lines_of(source: _Source, section: InputSection, file: str | None, only_if: bytes | None) -> Iterator[Line]:
    if source.format == "csv":
        yield from csv_lines(source.path, source.name, file)
    elif source.format == "parquet":
        yield from parquet_lines(source.path, file)
    elif source.format == "arrow":
        yield from arrow_lines(source.path, file)
    elif source.format == "dataset":
        yield from dataset_lines(source.path, section, file)
    else:
        with opened(source.path) as stream:
            yield from jsonl_lines(stream, where=source.name, file=file, only_if=only_if)
