"""The bytes of an input: of a file, unpacked if its name says that it is packed, or of stdin.

Knows compression, and which packages reading needs. Does not know lines.
"""

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from specgen.errors import InputError

_CHUNK_BYTES = 1 << 16


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Yield the bytes of a file, unpacked, or of stdin.

    Raises: InputError, OSError, EOFError, zlib.error: while it is read, too.
    """
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
        zstandard = optional_module("zstandard", "zst", path)
        unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)  # zstd --long=31 is the most there is
        with open(path, "rb") as stream:
            try:
                yield io.BufferedReader(_ZstReader(stream, unpacker), _CHUNK_BYTES)
            except zstandard.ZstdError as error:
                raise InputError(f"the compressed input is damaged: {error}", where=path) from None
    else:
        with open(path, "rb") as stream:
            yield stream


class _ZstReader(io.RawIOBase):
    """Unpacks Zstandard frames, one behind the other; the package's own reader takes a cut file for whole."""

    def __init__(self, stream: BinaryIO, decompressor: Any) -> None:
        self._stream = stream
        self._decompressor = decompressor
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is more. Raises: EOFError in the middle of a frame."""
        while not self._unpacked:
            if not self._packed:
                self._packed = self._stream.read(_CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._unpacked = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


def optional_module(name: str, extra: str, where: str) -> Any:
    """Return a module of a package that is not always there.

    Raises: InputError that names what to install.
    """
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        top = name.split(".")[0]
        raise InputError(
            f"reading this needs the package {top}", where=where, hint=f"pip install 'specgen[{extra}]'"
        ) from None
