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
from specgen.tokenizer import is_lfs_pointer, read_json

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
            raise ModelError(
                f"{self.name!r} has dtype {self.dtype_name}, which is not supported",
                where=str(self.path),
                hint=f"supported: {', '.join(_DTYPES)}",
            )
        return _DTYPES[self.dtype_name]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes


class Checkpoint:
    """The tensors of a folder, by name. Never unpickles.

    file_of: the names of their files, as the folder's index has them; {} without an index.
    """

    def __init__(self, folder: Path) -> None:
        """Lists the tensors. Of two of one name in different files, that one counts whose file the index says.

        Raises:
            ModelError: no safetensors file, a damaged one, an index that names a missing file, or two tensors of one
                name.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        index = folder / "model.safetensors.index.json"
        self.file_of = file_of = _read_index(index) if index.is_file() else {}
        for path in self._paths(index, file_of):
            for name, stored in _read_header(path).items():
                other = self.tensors.get(name)
                if other is None or file_of.get(name) == path.name:
                    self.tensors[name] = stored
                elif file_of.get(name) != other.path.name:
                    raise ModelError(
                        f"{name!r} is in {other.path.name} too",
                        where=str(path),
                        hint="move aside the file that does not belong to the model, or fetch the index of its files",
                    )

    @property
    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return frozenset(self.tensors)

    def missing(self, name: str, message: str, hint: str) -> ModelError:
        """The error that the tensor `name` is not there: where the index has it, or which file no index names."""
        if name in self.file_of:
            where = str(self.folder / self.file_of[name])
            return ModelError(message + ", and the index says that it is in this file", where=where, hint=hint)
        if unlisted := self._unlisted():
            hint += f"; {unlisted[0]} is in the folder, and the index does not name it"
        return ModelError(message, where=str(self.folder), hint=hint)

    def _unlisted(self) -> list[str]:
        """Files of tensors that the index, if there is one, does not name."""
        listed = set(self.file_of.values())
        return sorted({path.name for path in self.folder.glob("*.safetensors")} - listed) if listed else []

    def _paths(self, index: Path, file_of: dict[str, str]) -> list[Path]:
        paths = [self.folder / name for name in sorted(set(file_of.values()))]
        for path in paths:
            if not path.is_file() or path.parent != self.folder:
                raise ModelError(
                    f"names the file {path.name!r}, which is not there", where=str(index), hint="fetch the missing file"
                )
        paths = paths or sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise ModelError("no *.safetensors file", where=str(self.folder), hint="only safetensors are loaded")
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


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, as a model's index has it.

    Raises:
        ModelError: it is no index.
    """
    content = read_json(path)
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) for name in file_of.values()):
        raise ModelError(
            "not a safetensors index: it has no weight_map from tensors to files",
            where=str(path),
            hint="fetch the file again",
        )
    return file_of


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        ModelError: it is damaged.
    """
    if is_lfs_pointer(path):
        raise ModelError("this is Git LFS's pointer to the file, not the file", where=str(path), hint="git lfs pull")
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
