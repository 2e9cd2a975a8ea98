"""Output lines, appended whole and flushed, in input order or as rows finish.

Knows files and that nothing that is there already may be lost. Does not know what a line says.
"""

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from specgen.errors import InputError


def check_output(path: str, *, input_path: str | None, overwrite: bool) -> None:
    """Return if an output file can be made at `path`; touches nothing, so it can be asked before a model is loaded.

    Raises: InputError if it is the input itself, is there already (unless `overwrite`), or has no folder to be in.
    """
    if path == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise InputError("the output is a folder", where=path)
    if not target.absolute().parent.is_dir():
        raise InputError("the output's folder does not exist", where=path)
    if input_path not in (None, "-") and _same_file(target, Path(str(input_path))):
        raise InputError("the output is the input file", where=path)
    if target.is_file() and not overwrite:
        raise InputError(
            "the output is there already", where=path, hint="--overwrite moves it aside; --output names another"
        )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.resolve() == other.resolve()


def move_aside(path: Path) -> Path | None:
    """Rename a file that is in the way to `<name>.old`, `.old2`, …; returns the new path, None if nothing was there."""
    if not path.is_file():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number if number > 1 else ''}")).exists():
        number += 1
    path.rename(aside)
    return aside


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
            if overwrite:
                move_aside(Path(path))
            # Devices and pipes (/dev/null, a fifo) are there already and are written to as they are.
            special = Path(path).exists() and not Path(path).is_file()
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
