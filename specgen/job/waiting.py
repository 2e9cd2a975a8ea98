"""Lines that wait for those of earlier rows: in memory, and in a file, where the next run finds those of a killed one.

Knows slots and bytes. Does not know what a line says, nor when its turn comes.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specgen.errors import InputError

# Lines that are kept in memory, in bytes; of others there is only their place in the file.
_MEMORY_BYTES = 32 << 20
# A file is made anew, without the lines that were taken out, when it has so many bytes, and half of them are such.
_PACK_BYTES = 64 << 20


class Waiting:
    """Lines by slot. path: a file that has all of them; None: one without a name, for those beyond the memory's share.

    The file is made for the first line that needs it.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._lines: dict[int, bytes | tuple[int, int]] = {}
        self._num_bytes = self._num_in_memory = 0
        self._descriptor: int | None = None
        self._end = 0

    def __len__(self) -> int:
        """Return how many lines wait."""
        return len(self._lines)

    def slots(self) -> list[int]:
        """Return their slots in order."""
        return sorted(self._lines)

    def put(self, slot: int, line: bytes) -> None:
        """Let a line wait. Raises: InputError if the file cannot be written."""
        fits = self._num_in_memory + len(line) <= _MEMORY_BYTES
        place = (0, 0) if fits and self._path is None else self._append(line)
        self._lines[slot] = line if fits else place
        self._num_in_memory += len(line) if fits else 0
        self._num_bytes += len(line)

    def pop(self, slot: int) -> bytes | None:
        """Return the line of a slot, which waits no more, None if it does not wait; the file has it until `pack`."""
        held = self._lines.pop(slot, None)
        if held is None:
            return None
        line = self._read(held)
        self._num_bytes -= len(line)
        self._num_in_memory -= len(line) if line is held else 0
        return line

    def pack(self) -> None:
        """Let the file forget the lines that were taken out, if they are many; they are written elsewhere by now.

        Raises: InputError if the file cannot be written.
        """
        if self._end < max(_PACK_BYTES, 2 * self._num_bytes):
            return
        packed = Waiting(None if self._path is None else f"{self._path}.new")
        for slot in self.slots():
            packed.put(slot, self._read(self._lines[slot]))
        self.close(forget=packed._descriptor is None)
        if packed._path is not None and self._path is not None and packed._descriptor is not None:
            with _told(self._path):
                os.replace(packed._path, self._path)
        self._lines, self._num_in_memory = packed._lines, packed._num_in_memory
        self._descriptor, self._end = packed._descriptor, packed._end

    def close(self, *, forget: bool) -> None:
        """Close the file. forget: and take it away, as all lines are written elsewhere."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if forget and self._path is not None:
                with suppress(OSError):
                    os.unlink(self._path)

    def _read(self, held: bytes | tuple[int, int]) -> bytes:
        if isinstance(held, bytes):
            return held
        assert self._descriptor is not None
        return os.pread(self._descriptor, held[1], held[0])

    def _append(self, line: bytes) -> tuple[int, int]:
        with _told(self._path):
            if self._descriptor is None:
                self._descriptor = self._opened()
            written = 0
            while written < len(line):
                written += os.pwrite(self._descriptor, line[written:], self._end + written)
        self._end += written
        return self._end - written, written

    def _opened(self) -> int:
        if self._path is not None:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with tempfile.TemporaryFile() as stream:
            return os.dup(stream.fileno())


@contextmanager
def _told(path: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "lines that wait for an earlier one cannot be put aside"
        hint = "output.order=completion lets none wait"
        raise InputError(f"{what}: {error.strerror}", where=path, hint=hint) from error
