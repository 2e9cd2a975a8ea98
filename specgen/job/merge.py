"""The outputs of a recipe's shards, put together into one: nothing missing, nothing twice, in the order of the input.

Knows manifests and lines. Does not know rows.
"""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from specgen.errors import InputError
from specgen.job.journal import replace_file, write_in_order
from specgen.job.manifest import Manifest
from specgen.job.openai_answers import BatchForm
from specgen.job.places import files_beside
from specgen.job.record import Form, RecordForm


def shard_path(output: str, shard: tuple[int, int]) -> str:
    """Return where a shard's answers go: `out.jsonl` becomes `out.2-of-8.jsonl`."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{shard[0]}-of-{shard[1]}{path.suffix}"))


def parts_of(output: str) -> list[str]:
    """Return the outputs of shards that belong to `output` by their names, in the order of their numbers."""
    path = Path(output)
    pattern = re.compile(re.escape(path.stem) + r"\.(\d+)-of-\d+" + re.escape(path.suffix))
    names = glob.glob(glob.escape(str(path.parent / path.stem)) + ".*-of-*" + glob.escape(path.suffix))
    numbered = [(int(found[1]), name) for name in names if (found := pattern.fullmatch(os.path.basename(name)))]
    return [name for _, name in sorted(numbered)]


def merge(output: str, parts: Sequence[str]) -> Manifest:
    """Write all lines of the parts to `output`, a manifest beside it, and return that.

    Raises: InputError if a part is missing, incomplete, damaged or of another run, if lines are missing or there twice,
    or if `output` is there already.
    """
    for name in (output, *files_beside(output)):
        if os.path.lexists(name):
            raise InputError("it is there already", where=name, hint="move it away, or give another name")
    if not parts:
        raise InputError("there are no parts of it (NAME.1-of-N.jsonl, …)", where=output)
    manifests = [_manifest_of(part) for part in parts]
    _check_parts(parts, manifests)
    # A shard without rows was never run, and does not know what the engine resolved.
    first = max(manifests, key=lambda one: len(one.content["sessions"]) > 0).content
    is_batch = first["form"] == "openai-batch"
    form: Form = BatchForm(0, str) if is_batch else RecordForm(with_token_ids=False, with_truncation=False)
    expected = sum(one.content["lines"] for one in manifests)

    def write(stream: BinaryIO) -> None:
        num_lines = write_in_order(parts, form, stream).lines
        if num_lines != expected:
            raise InputError(f"the parts have {num_lines:,} lines and their manifests say {expected:,}", where=output)

    merged = Manifest(
        first
        | {
            "shard": None,
            "lines": expected,
            "failed": sum(one.content["failed"] for one in manifests),
            "rows_in_shard": first["rows"],
            "sessions": [session for one in manifests for session in one.content["sessions"]],
        }
    )
    replace_file(output, write)
    merged.write(output)
    return merged


def _manifest_of(part: str) -> Manifest:
    if not os.path.isfile(part):
        raise InputError("there is no such part", where=part)
    manifest = Manifest.read(part)
    if manifest is None:
        raise InputError("the part has no manifest beside it", where=part, hint="NAME.manifest.json goes with NAME")
    if manifest.content["shard"] is None:
        raise InputError("this is a whole output and no shard's", where=part)
    if not manifest.content["complete"]:
        raise InputError("the part is not complete", where=part, hint="run its shard again: it goes on where it was")
    return manifest


def _check_parts(parts: Sequence[str], manifests: Sequence[Manifest]) -> None:
    count = manifests[0].content["shard"][1]
    seen: dict[int, str] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        content, _ = manifests[0].without_shard().differences(manifest.without_shard())
        if manifest.content["shard"][1] != count:
            content.append(f"the number of shards was {count} and is {manifest.content['shard'][1]}")
        if manifest.content["rows"] != manifests[0].content["rows"]:
            content.append(f"rows was {manifests[0].content['rows']} and is {manifest.content['rows']}")
        if content:
            raise InputError(f"the part is not of the same run as {parts[0]}: {'; '.join(content)}", where=part)
        number = manifest.content["shard"][0]
        if number in seen:
            raise InputError(f"this is shard {number}, as {seen[number]} is", where=part)
        seen[number] = part
    missing = [str(number) for number in range(1, count + 1) if number not in seen]
    if missing:
        shards = ", ".join(missing)
        hint = f"`specgen run` with --shard {missing[0]}/{count} makes one"
        raise InputError(f"of {count} parts, these are missing: {shards}", where=parts[0], hint=hint)
    rows, in_parts = manifests[0].content["rows"], sum(one.content["rows_in_shard"] for one in manifests)
    if rows != in_parts:
        raise InputError(
            f"the input has {rows:,} rows and the parts have {in_parts:,}: it changed between their runs",
            where=parts[0],
            hint="run every shard again: each runs what it lacks",
        )
