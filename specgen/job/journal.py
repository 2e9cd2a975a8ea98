"""What an output file holds already, and how it is made fit to be appended to.

Knows complete, torn and damaged lines, which rows are done, and how lines are put into the order of the input. Does not
know how lines come to be.
"""

import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from specgen.errors import InputError
from specgen.job.digest_map import DigestMap, digest_of
from specgen.job.plan import Plan
from specgen.job.record import Form, Kept

# What is remembered of a line: the mark of its row in 24 bits, and its number.
_NUMBER_BITS = 40


@dataclass(slots=True)
class Journal:
    """The lines of an output that count.

    lines: complete ones, failed: those of them with an error. size: bytes up to the end of the last complete line.
    torn_bytes: what stands behind that. in_order: whether the lines stand in input order. last_index: the last one's.
    """

    lines: int = 0
    failed: int = 0
    size: int = 0
    torn_bytes: int = 0
    in_order: bool = True
    last_index: int = -1
    _last_sample: int = -1
    _done: DigestMap = field(default_factory=DigestMap)

    def add(self, kept: Kept, number: int) -> int:
        """Count a line; returns the number of the line where its row and sample were first, `number` if here.

        number: any that fits into 64 bits.
        """
        self.lines += 1
        self.failed += kept.failed
        sample = -1 if kept.sample is None else kept.sample
        self.in_order = self.in_order and (kept.index, sample) >= (self.last_index, self._last_sample)
        self.last_index, self._last_sample = kept.index, sample
        return self._done.setdefault(_done_digest(kept.key, kept.sample), number)

    def has(self, kept: Kept) -> bool:
        """Return whether there is a line already for what a line answers."""
        return any(_done_digest(kept.key, sample) in self._done for sample in {kept.sample, None})

    def missing(self, key: str, samples: Sequence[int]) -> tuple[int, ...]:
        """Return those of a row's samples that have no line yet."""
        if _done_digest(key, None) in self._done:
            return ()  # the row failed, or has one line for all of them
        return tuple(sample for sample in samples if _done_digest(key, sample) not in self._done)

    def has_changed(self, key: str, sample: int, mark: int) -> bool:
        """Whether the row of a line had another content; of a journal that was read."""
        for which in (sample, None):
            value = self._done.get(_done_digest(key, which))
            if value is not None:
                return 0 not in (mark, value >> _NUMBER_BITS) and mark != value >> _NUMBER_BITS
        return False


def _done_digest(key: str, sample: int | None) -> bytes:
    return digest_of(f"{key}\0{'' if sample is None else sample}")


def read_journal(path: str, form: Form) -> Journal:
    """Return what the output at `path` holds.

    Raises: InputError for a line that is damaged or there twice, with its number; a torn last line is no damage.
    """
    journal = Journal()
    for number, line in enumerate(_complete_lines(path, journal), start=1):
        kept = _parsed(line, form, path, number)
        first = journal.add(kept, kept.mark << _NUMBER_BITS | number) & ((1 << _NUMBER_BITS) - 1)
        if first != number:
            raise InputError(
                f"the line answers the row that line {first} answers",
                where=f"{path}:{number}",
                hint="take one of the two out; --fresh moves the file aside and starts over",
            )
    return journal


def _parsed(line: bytes, form: Form, path: str, number: int) -> Kept:
    try:
        return form.parse(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the line is no complete record: {error}",
            where=f"{path}:{number}",
            hint="take the line out to have its row answered again; --fresh moves the file aside and starts over",
        ) from None


def _complete_lines(path: str, journal: Journal) -> Iterator[bytes]:
    """Yield the lines that end; what stands behind the last one is torn."""
    try:
        with open(path, "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    journal.torn_bytes = len(line)
                    return
                yield line
                journal.size += len(line)
    except OSError as error:
        raise InputError(f"the output cannot be read: {error.strerror}", where=path) from error


def cut_torn_line(path: str, journal: Journal) -> None:
    """Leave only complete lines at `path`.

    Raises: InputError if that cannot be done.
    """
    if journal.torn_bytes:
        try:
            with open(path, "r+b") as stream:
                stream.truncate(journal.size)
                os.fsync(stream.fileno())
        except OSError as error:
            raise InputError(f"its torn last line cannot be cut off: {error.strerror}", where=path) from error
        journal.torn_bytes = 0


def waiting_lines(path: str, form: Form, journal: Journal, *, with_failed: bool) -> Iterator[bytes]:
    """Yield the lines at `path` that answer what no line of the journal does, and count them as lines of it.

    What is no whole line is left out: a killed run wrote it last, and its row is answered again.

    Raises: InputError if the file is there and cannot be read.
    """
    if not os.path.exists(path):
        return
    for line in _complete_lines(path, Journal()):
        try:
            kept = form.parse(line)
        except (ValueError, RecursionError):
            continue
        if (with_failed or not kept.failed) and not journal.has(kept):
            journal.add(kept, kept.mark << _NUMBER_BITS | journal.lines + 1)
            journal.size += len(line)
            yield line


def drop_failed(path: str, form: Form) -> None:
    """Take the lines of failed rows out of a file, in one step or not at all.

    Raises: InputError if the file cannot be written or a line is damaged.
    """

    def write(stream: BinaryIO) -> None:
        for number, line in enumerate(_complete_lines(path, Journal()), start=1):
            if not _parsed(line, form, path, number).failed:
                stream.write(line)

    replace_file(path, write)


def pending(plans: Iterable[Plan], journal: Journal, form: Form, skipped: Callable[[Plan], None]) -> Iterator[Plan]:
    """Yield the plans with samples that have no line yet, and these samples alone; `skipped` is told the others."""
    for plan in plans:
        if journal.lines:
            missing = journal.missing(form.key(plan), plan.samples)
            if not missing:
                skipped(plan)
                continue
            plan.samples = missing
        yield plan


def sort_output(path: str, form: Form) -> None:
    """Put the lines of a file into the order of the input, in one step or not at all.

    Raises: InputError if the file cannot be written or a line is damaged.
    """
    replace_file(path, lambda stream: write_in_order([path], form, stream))


def write_in_order(paths: Sequence[str], form: Form, stream: BinaryIO) -> Journal:
    """Write the lines of all files to `stream` in the order of the input; remembers 20 bytes a line and its digest.

    Raises: InputError if a line is damaged, or answers what another one answers.
    """
    whole = Journal()
    offsets, indices, samples, files = array("Q"), array("q"), array("i"), array("H")
    for file, path in enumerate(paths):
        part = Journal()
        for number, line in enumerate(_complete_lines(path, part), start=1):
            kept = _parsed(line, form, path, number)
            offsets.append(part.size)
            indices.append(kept.index)
            samples.append(-1 if kept.sample is None else kept.sample)
            files.append(file)
            first = whole.add(kept, file << 40 | number)
            if first != file << 40 | number:
                there = f"{paths[first >> 40]}:{first & ((1 << 40) - 1)}"
                raise InputError(f"the line answers the row that {there} answers", where=f"{path}:{number}")
    order = np.lexsort((np.asarray(samples), np.asarray(indices)))
    with ExitStack() as stack:
        parts = [stack.enter_context(open(path, "rb")) for path in paths]
        for entry in order:
            part_stream = parts[files[entry]]
            if part_stream.tell() != offsets[entry]:
                part_stream.seek(offsets[entry])
            stream.write(part_stream.readline())
    return whole


def replace_file(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Put what `write` writes in the place of a file, in one step or not at all; it may read the old one meanwhile.

    A link stays a link, and the file keeps its permissions.

    Raises: InputError if that cannot be done.
    """
    path = os.path.realpath(path)
    temporary = f"{path}.specgen-new"
    try:
        with open(temporary, "wb") as stream:
            if os.path.exists(path):
                shutil.copymode(path, temporary)
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"the file cannot be written: {error.strerror}", where=path) from error
        raise


def sync_folder(path: str) -> None:
    """Force the entry of a file in its folder to disk, where that is possible."""
    with suppress(OSError):
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
