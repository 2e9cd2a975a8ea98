"""Where a job's files may be written, found out before a model is loaded.

Knows folders, devices and that nothing that is there may be lost. Does not know what is in the files.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePath

from specgen.errors import InputError

# Names that say something else than JSONL; the answers would be read wrongly.
_OTHER_FORMATS = (".gz", ".zst", ".csv", ".parquet", ".pq", ".arrow", ".feather", ".ipc")

# How the files begin that may be replaced by a new one of their kind; JSONL has its first key on the first line.
_STARTS = {"page": b"<!doctype html>", "JSON file": b"{\n", "statistics file": b"{\n"}


def recipe_beside(output: str) -> str | None:
    """Return the path of the recipe that is written beside an output, None beside stdout, a device or a pipe."""
    return None if output == "-" or is_special(output) else f"{output}.recipe.yaml"


def waiting_beside(output: str) -> str:
    """Return the path of the file with the lines of an output that wait for earlier ones."""
    return f"{output}.waiting"


def files_beside(output: str) -> list[str]:
    """Return the paths of what is written beside an output: recipe, manifest and lines that wait."""
    recipe = recipe_beside(output)
    return [] if recipe is None else [recipe, f"{output}.manifest.json", waiting_beside(output)]


def check_output(
    path: str, *, inputs: Sequence[str], patterns: Sequence[str] = (), recipe_path: Path | None = None
) -> None:
    """Return if an output, and what is beside it, can be made or continued; leaves no trace, so it can be asked early.

    patterns: globs of inputs, which the output must not fit, or the next run would read it.

    Raises: InputError if one of them is an input or the recipe that is run (`recipe_path`), or cannot be in its folder.
    """
    if path == "-" or is_special(path):
        _check_open_end(path, "output")
        if any(_same_file(path, other) for other in inputs):
            raise InputError("the output is the input file, which would never end", where="stdout")
        return
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _OTHER_FORMATS:
        raise InputError(
            f"answers are written as JSONL, which {suffix} does not say", where=path, hint="NAME.jsonl does"
        )
    beside = zip(files_beside(path), ("recipe", "manifest", "file of waiting lines"), strict=True)
    for target, what in (
        (path, "output"),
        *((name, f"{what} that is written beside the output") for name, what in beside),
    ):
        _check_place(target, what)
        for pattern in patterns:
            if PurePath(os.path.abspath(target)).match(os.path.abspath(pattern)):
                raise InputError(
                    f"the {what} would be read as input by the next run: {pattern} takes it in",
                    where=target,
                    hint="--output names another place",
                )
        if any(_same_file(target, other) for other in inputs):
            raise InputError(f"the {what} is the input file", where=target, hint="--output names another")
        if recipe_path is not None and _same_file(target, str(recipe_path)):
            raise InputError(f"the {what} is the recipe that is being run", where=target, hint="--output names another")
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise InputError(f"the {what} cannot be written", where=target)
        _check_folder(target, what)


def check_replaceable(path: str, what: str, others: Sequence[str]) -> None:
    """Return if a file can be written at `path`, where an old one may be replaced; leaves no trace. `-` is stdout;
    among `others`, what stdin and stdout were redirected to.

    Raises: InputError if it is one of `others`, or cannot be written, or a file is there that is not of this kind: rows
        or answers, say, that a slip in a command line would cost.
    """
    if path == "-" or is_special(path):
        _check_open_end(path, what)
        return
    _check_place(path, what)
    if any(_same_file(path, other) or (other == "-" and _same_file("-", path)) for other in others):
        raise InputError(f"the {what} would overwrite a file of this job", where=path)
    if not os.path.isfile(path):
        _check_folder(path, what)
        return
    start = _STARTS.get(what, b"")
    try:
        with open(path, "ab"):
            pass
        with open(path, "rb") as stream:
            found = stream.read(len(start))
    except OSError as error:
        raise InputError(f"the {what} cannot be written: {error.strerror}", where=path) from None
    if found and found.lower() != start:
        raise InputError(
            f"the {what} would overwrite a file that is none", where=path, hint="name another, or take it away first"
        )


def write_file(path: str, text: str, what: str) -> None:
    """Write a whole text file, in place of an old one.

    Raises: InputError.
    """
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"the {what} cannot be written: {error.strerror}", where=path) from None


def is_special(path: str) -> bool:
    """Return whether a device or a pipe is there, neither file nor folder: it is written to as it is."""
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


def _same_file(written: str, read: str) -> bool:
    """Whether two files are one, however they are named; `-` is what stdout, or stdin, was redirected to."""
    try:
        there = os.fstat(1) if written == "-" else os.stat(written)
        found = os.fstat(0) if read == "-" else os.stat(read)
    except OSError:
        return "-" not in (written, read) and os.path.realpath(written) == os.path.realpath(read)
    return stat.S_ISREG(there.st_mode) and os.path.samestat(there, found)


def move_aside(paths: Sequence[str]) -> str | None:
    """Rename those that are there to `<name>.old`, or all to `.old2`, …: what belongs together keeps one number.

    Returns what was put after the names, None if nothing was there.
    """
    number, suffix = 1, ".old"
    while any(os.path.lexists(path + suffix) for path in paths):
        number += 1
        suffix = f".old{number}"
    there = [path for path in paths if os.path.lexists(path)]
    for path in there:
        os.rename(path, path + suffix)
    return suffix if there else None
