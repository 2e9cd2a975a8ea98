"""The safetensors files of a folder: which tensors they hold, and where their bytes lie.

Bytes are read, not mapped: a map takes a page fault for every 4 KB, which costs more than the copy that it saves, and
under some virtual machines a hundred times more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from specgen.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,  # with a scale beside it: `fp8`
}


class StoredTensor(NamedTuple):
    """A tensor in a file: `num_bytes` of it from `offset` on. `dtype_name` is as safetensors names it."""

    name: str
    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements.

        Raises:
            ModelError: it is none that models are loaded from.
        """
        if self.dtype_name not in _DTYPES:
            raise ModelError(f"{self.name!r} has dtype {self.dtype_name}, which is not supported", where=str(self.path))
        return _DTYPES[self.dtype_name]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes


class Checkpoint:
    """The tensors of a folder, by name. Never unpickles."""

    def __init__(self, folder: Path) -> None:
        """Lists the tensors.

        Raises:
            ModelError: no safetensors file, a damaged one, or an index that names a missing file.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for path in self._paths():
            self.tensors.update(_read_header(path))

    @property
    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return frozenset(self.tensors)

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            paths = sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise ModelError("no *.safetensors file", where=str(self.folder), hint="only safetensors are loaded")
            return paths
        try:
            stored = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"not a safetensors index: {error}", where=str(index)) from error
        paths = [self.folder / name for name in stored]
        for path in paths:
            if not path.is_file() or path.parent != self.folder:
                raise ModelError(f"names the file {path.name!r}, which is not there", where=str(index))
        return paths

    def units(self, names: Iterable[str], max_bytes: int) -> list[list[StoredTensor]]:
        """The given tensors in the order in which they lie on the disk, in portions of a file of about `max_bytes`."""
        units: list[list[StoredTensor]] = []
        size = 0
        for stored in sorted((self.tensors[name] for name in names), key=lambda t: (t.path, t.offset)):
            if not units or units[-1][0].path != stored.path or size + stored.num_bytes > max_bytes:
                units.append([])
                size = 0
            units[-1].append(stored)
            size += stored.num_bytes
        return units


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        ModelError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt"):  # checks that header and size agree, and nothing overlaps
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"damaged or truncated: {error}", where=str(path), hint="fetch the file again") from error
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: StoredTensor(
            name,
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


class TensorFile:
    """An open file of tensors. May be read from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens it; close by `with`."""
        self._path = path
        self._file = path.open("rb", buffering=0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_rows(self, stored: StoredTensor, start: int, end: int, into: torch.Tensor) -> torch.Tensor:
        """Reads the indices `[start, end)` of the first dimension; returns them as a view of `into` (uint8, CPU).

        Raises:
            ModelError: the file ends too early.
        """
        shape = (end - start, *stored.shape[1:]) if stored.shape else ()
        num_bytes = math.prod(shape) * stored.dtype.itemsize
        buffer = into.numpy().data[:num_bytes]
        offset, done = stored.offset + start * stored.row_bytes, 0
        while done < num_bytes:
            count = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            if count <= 0:
                raise ModelError("ends too early", where=str(self._path), hint="fetch the file again")
            done += count
        return into[:num_bytes].view(stored.dtype).view(shape)
