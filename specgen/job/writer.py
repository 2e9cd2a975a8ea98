"""Output lines, appended whole and flushed, in input order or as rows finish.

Knows files and that nothing that is there already may be lost. Does not know what a line says.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from specgen.errors import InputError


def recipe_beside(output: str) -> str | None:
    """Return the path of the recipe that is written beside an output, None beside stdout, a device or a pipe."""
    return None if output == "-" or _is_special(output) else f"{output}.recipe.yaml"


def check_output(path: str, *, input_path: str | None, overwrite: bool, recipe_path: Path | None = None) -> None:
    """Return if an output file, and the recipe beside it, can be made; leaves no trace, so it can be asked early.

    Raises: InputError if one of them is the input or the recipe that is run (`recipe_path`), is there already (unless
    `overwrite`), or cannot be in its folder.
    """
    if path == "-" or _is_special(path):
        _check_open_end(path, "output")
        return
    for target, what in ((path, "output"), (f"{path}.recipe.yaml", "recipe that is written beside the output")):
        _check_place(target, what)
        if input_path not in (None, "-") and _same_file(target, str(input_path)):
            raise InputError(f"the {what} is the input file", where=target, hint="--output names another")
        if recipe_path is not None and _same_file(target, str(recipe_path)):
            raise InputError(f"the {what} is the recipe that is being run", where=target, hint="--output names another")
        if os.path.lexists(target) and not overwrite:
            raise InputError(
                f"the {what} is there already", where=target, hint="--overwrite moves it aside; --output names another"
            )
        _check_folder(target, what)


def check_replaceable(path: str, what: str, others: Sequence[str]) -> None:
    """Return if a file can be written at `path`, where an old one may be replaced; leaves no trace. `-` is stdout.

    Raises: InputError if it is one of `others`, or cannot be written.
    """
    if path == "-" or _is_special(path):
        _check_open_end(path, what)
        return
    _check_place(path, what)
    if any(other != "-" and _same_file(path, other) for other in others):
        raise InputError(f"the {what} would overwrite a file of this job", where=path)
    if not os.path.isfile(path):
        _check_folder(path, what)
        return
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise InputError(f"the {what} cannot be written: {error.strerror}", where=path) from None


def write_file(path: str, text: str, what: str) -> None:
    """Write a whole text file, in place of an old one.

    Raises: InputError.
    """
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"the {what} cannot be written: {error.strerror}", where=path) from None


def _is_special(path: str) -> bool:
    """Whether something is there that is neither a file nor a folder: a device or a pipe, written to as it is."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _check_open_end(path: str, what: str) -> None:
    if path == "-" and sys.stdout is None:
        raise InputError(f"the {what} is to go to stdout, which is closed")
    if path != "-" and not os.access(path, os.W_OK):
        raise InputError(f"the {what} cannot be written", where=path)


def _check_place(path: str, what: str) -> None:
    if os.path.isdir(path):
        raise InputError(f"the {what} is a folder", where=path)
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InputError(f"the {what}'s folder does not exist", where=path)
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:  # the name is too long, say
        raise InputError(f"the {what} cannot be made: {error.strerror}", where=path) from None


def _check_folder(path: str, what: str) -> None:
    """Only making a file tells whether one can be made: permissions are not the whole story (root, read-only disks)."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))):
            pass
    except OSError as error:
        raise InputError(
            f"the {what} cannot be made: {error.strerror}", where=path, hint="can you write to that folder?"
        ) from None


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def move_aside(path: str) -> str | None:
    """Rename what is in the way to `<name>.old`, `.old2`, …; returns the new path, None if nothing was there."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(aside := f"{path}.old{number if number > 1 else ''}"):
        number += 1
    os.rename(path, aside)
    return aside


def write_new(path: str, text: str, *, overwrite: bool) -> None:
    """Write a whole text file that was not there; an old one is moved aside if `overwrite`.

    Raises: InputError if one is there, or it cannot be made.
    """
    try:
        if overwrite:
            move_aside(path)
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"the file cannot be made: {error.strerror}", where=path) from None


class LineWriter:
    """Writes lines to a file or stdout; a context manager.

    ordered: a line waits until those of all lower indices are written or skipped; whoever gives the lines out bounds
    how many may wait (`num_held`).
    """

    def __init__(self, stream: BinaryIO, *, ordered: bool) -> None:
        self.num_held = 0
        self._stream = stream
        self._ordered = ordered
        self._next = 0
        self._held: dict[int, bytes] = {}

    @classmethod
    def open(cls, path: str, *, ordered: bool, overwrite: bool = False) -> "LineWriter":
        """Return a writer to a new file at `path` (an old one is moved aside if `overwrite`), or to stdout for `-`.

        Raises: InputError if the file cannot be made.
        """
        if path == "-":
            return cls(sys.stdout.buffer, ordered=ordered)
        try:
            special = _is_special(path)
            if overwrite and not special:
                move_aside(path)
            return cls(open(path, "wb" if special else "xb"), ordered=ordered)
        except OSError as error:
            raise InputError(f"the output cannot be made: {error.strerror}", where=path) from None

    def put(self, index: int, line: bytes) -> None:
        """Write the line of row `index`, or hold it until its turn."""
        if not self._ordered:
            self._write(line)
            return
        self._held[index] = line
        while (ready := self._held.pop(self._next, None)) is not None:
            self._write(ready)
            self._next += 1
        self.num_held = len(self._held)

    def flush(self) -> None:
        """Hand everything that was written to the operating system.

        Raises: InputError if the disk is full or gone, BrokenPipeError if nobody reads any more.
        """
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(f"writing the output failed: {error.strerror}") from error

    def _write(self, line: bytes) -> None:
        try:
            self._stream.write(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(f"writing the output failed: {error.strerror}") from error

    def write_held(self) -> None:
        """Write the lines that still wait for others that will never come, in order, and flush."""
        for index in sorted(self._held):
            self._write(self._held.pop(index))
            self._next = index + 1
        self.num_held = 0
        self.flush()

    def __enter__(self) -> "LineWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is held and close the file (stdout stays open)."""
        try:
            self.write_held()
        except (BrokenPipeError, InputError):
            # What cannot be written now must not be tried again at the closing, or when the interpreter exits.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if error is None:
                raise
        finally:
            if self._stream is not sys.stdout.buffer:
                self._stream.close()
