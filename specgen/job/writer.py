"""Output lines, appended whole, in input order or as rows finish.

Knows files, what a full disk does to them, and how lines that come too early wait. Does not know what a line says.
"""

import contextlib
import fcntl
import os
import sys
import time
from types import TracebackType
from typing import BinaryIO, Protocol

from specgen.errors import InputError
from specgen.job.waiting import Waiting

# Lines that wait for an earlier one, before no further row is begun.
MAX_HELD_LINES = 200_000


class Sink(Protocol):
    """What takes whole lines."""

    def write(self, lines: bytes) -> None:
        """Take lines, or none: called often, so that what was taken can be forced to disk when that is due.

        Raises: InputError if they cannot be written, BrokenPipeError if nobody reads any more.
        """

    def close(self) -> None:
        """End; nothing comes after."""


class FileSink:
    """Appends to a file of which it is the only writer; whatever fails, no part of a line stays in it.

    size: its bytes. fsync_seconds, fsync_rows: lines are forced to disk when so much time or so many lines have
    passed, and at the end.
    """

    def __init__(self, path: str, *, fsync_seconds: float | None = None, fsync_rows: int | None = None) -> None:
        """Open a file at its end, or make it.

        Raises: InputError if that cannot be done, or another process writes to it.
        """
        self._path = path
        self._fsync_seconds = fsync_seconds
        self._fsync_rows = fsync_rows
        self._num_unsynced = 0
        self._last_sync = time.monotonic()
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(f"the output cannot be made: {error.strerror}", where=path) from None
        if not self._is_ours():
            os.close(self._descriptor)
            raise InputError(
                "another run is writing to this output", where=path, hint="--output or --shard names another"
            )
        self.size = os.fstat(self._descriptor).st_size

    def _is_ours(self) -> bool:
        """Lock the file; whether that worked, and it still is the file of its name (a run that sorts replaces it)."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            return False

    def write(self, lines: bytes) -> None:
        """Append lines; those that do not fit whole are taken back.

        Raises: InputError if the disk is full or gone.
        """
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:] if written else lines)
            self.size += written
            self._num_unsynced += lines.count(b"\n")
            if self._is_sync_due():
                self.sync()
        except OSError as error:
            whole = lines.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size + whole if written < len(lines) else self.size)
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> InputError:
        hint = "what is there is whole: once that is mended, the same command goes on"
        return InputError(f"writing the output failed: {error.strerror}", where=self._path, hint=hint)

    def sync(self) -> None:
        """Force everything to disk."""
        os.fsync(self._descriptor)
        self._num_unsynced = 0
        self._last_sync = time.monotonic()

    def _is_sync_due(self) -> bool:
        if not self._num_unsynced:
            return False
        if self._fsync_rows is not None and self._num_unsynced >= self._fsync_rows:
            return True
        return self._fsync_seconds is not None and time.monotonic() - self._last_sync >= self._fsync_seconds

    def close(self) -> None:
        """Force what is left to disk, and let others write.

        Raises: InputError if the disk is gone.
        """
        try:
            if self._num_unsynced:
                self.sync()
        except OSError as error:
            raise self._failure(error) from error
        finally:
            os.close(self._descriptor)


class StreamSink:
    """Writes to stdout, a device or a pipe."""

    def __init__(self, path: str) -> None:
        """Raises: InputError if it cannot be opened."""
        self._is_stdout = path == "-"
        self._path = path
        try:
            self._stream: BinaryIO = sys.stdout.buffer if self._is_stdout else open(path, "wb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"the output cannot be opened: {error.strerror}", where=path) from None

    def write(self, lines: bytes) -> None:
        """Write lines and hand them on at once.

        Raises: InputError if they cannot be written, BrokenPipeError if nobody reads any more.
        """
        try:
            self._stream.write(lines)
            self._stream.flush()
        except OSError as error:
            # What cannot be written now must not be tried again at the closing, or when the interpreter exits.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            where = "stdout" if self._is_stdout else self._path
            raise InputError(f"writing the output failed: {error.strerror}", where=where) from error

    def close(self) -> None:
        """Close a file; stdout stays open."""
        if not self._is_stdout:
            self._stream.close()


class LineWriter:
    """Puts lines into order, if they have one, and hands them to a sink; a context manager.

    ordered: a line waits until those of all lower slots are written, see `Waiting` for where, and `waiting_path`;
    whoever gives the lines out bounds how many may wait (`num_held`).
    """

    def __init__(self, sink: Sink, *, ordered: bool, waiting_path: str | None = None) -> None:
        self.num_written = 0
        self._sink = sink
        self._ordered = ordered
        self._next = 0
        self._is_writing = False
        self._has_failed = False
        self._ready: list[bytes] = []
        self._waiting = Waiting(waiting_path)

    @property
    def num_held(self) -> int:
        """Lines that wait."""
        return len(self._waiting)

    def put(self, slot: int, line: bytes) -> None:
        """Take the line of a slot; slots are counted from 0 without gaps.

        Raises: InputError if it must wait, and cannot be put aside.
        """
        if self._ordered and slot != self._next:
            self._waiting.put(slot, line)
            return
        self._ready.append(line)
        self._next += 1
        while (held := self._waiting.pop(self._next)) is not None:
            self._ready.append(held)
            self._next += 1

    def flush(self) -> None:
        """Hand the lines whose turn it is to the sink, all in one write; if there are none, let it do what is due.

        Called by a signal's handler in the middle of a write, it does nothing: what comes after half a line is damage.

        Raises: InputError if the disk is full or gone, BrokenPipeError if nobody reads any more.
        """
        if self._is_writing:
            return
        self._is_writing = True
        try:
            ready, self._ready = self._ready, []
            self._sink.write(b"".join(ready))
            self.num_written += len(ready)
            self._waiting.pack()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._is_writing = False

    def write_held(self) -> None:
        """Write the lines that still wait for others that will never come, in order.

        Raises: what `flush` raises.
        """
        for slot in self._waiting.slots():
            self._ready.append(self._waiting.pop(slot) or b"")
            self._next = slot + 1
        self.flush()

    def __enter__(self) -> "LineWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is held and close the sink."""
        try:
            self.write_held()
        except (BrokenPipeError, InputError):
            if error is None:
                raise
        finally:
            self._waiting.close(forget=not self._has_failed)
            self._sink.close()
