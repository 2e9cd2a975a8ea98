"""What made an output: a JSON file beside it, written before its first line and again at the end of every run.

Knows which settings change what is written and which only how fast. Does not know rows.
"""

import calendar
import hashlib
import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specgen.errors import InputError
from specgen.job.job import Progress
from specgen.job.journal import replace_file
from specgen.recipe import Recipe
from specgen.tokenizer import vocabulary_file

_VERSION = 1
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_PACKAGES = ("specgen", "torch", "triton", "tokenizers", "numpy")
# Keys that may change between the runs that make one output; whatever is not here decides what is written.
_FREE = {
    "model.path",  # the fingerprints speak for it
    "model.dtype",  # what was resolved speaks for it
    "model.device",
    "speculation.dtype",
    "speculation.vocab_size",
    "sampling.n",
    "input.path",
    "input.format",
    "input.subset",
    "input.split",
    "input.streaming",
    "input.limit",
    "input.keep",
    "input.duplicate_ids",
    "input.chat_template",
    "output.path",
    "output.order",
    "output.on_error",
    "output.on_interrupt",
    "output.fsync_seconds",
    "output.fsync_rows",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.max_model_len",
    "engine.block_size",
    "engine.num_blocks",
    "engine.memory_fraction",
    "engine.enable_prefix_caching",
    "engine.async_scheduling",
    "engine.cuda_graphs",
    "engine.group_prefixes",
    "engine.watchdog_seconds",
}
# Files of weights are hashed whole up to so many bytes; of larger ones, so many pieces of this size.
_WHOLE_BYTES = 64 << 20
_PIECE_BYTES = 64 << 10
_NUM_PIECES = 256
_MAX_POINTS = 240
_START_OVER = "--fresh moves it aside with the answers and starts over; --output names another file"


class Manifest:
    """The content of a manifest; `sessions` has an entry for every run that made a part of the output."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @classmethod
    def of(
        cls, recipe: Recipe, *, form: str, shard: tuple[int, int] | None, prints: Mapping[str, object]
    ) -> "Manifest":
        """Return the manifest of an output that is about to be begun."""
        recipe_part = {
            key: {"value": _as_json(value), "origin": recipe.origins.get(key, "default")}
            for key, value in recipe.values().items()
        }
        return cls(
            {
                "manifest": _VERSION,
                "created": now(),
                "form": form,
                "shard": list(shard) if shard is not None else None,
                "complete": False,
                "lines": 0,
                "failed": 0,
                "rows": None,
                "rows_in_shard": None,
                "fingerprints": dict(prints),
                "resolved": {},
                "recipe": recipe_part,
                "sessions": [],
            }
        )

    @classmethod
    def read(cls, output: str) -> "Manifest | None":
        """Return the manifest of an output, None if there is none.

        Raises: InputError if it cannot be read.
        """
        path = manifest_path(output)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"the manifest cannot be read: {error}", where=path, hint=_START_OVER) from None
        if not isinstance(content, dict) or content.get("manifest") != _VERSION:
            raise InputError("this is no manifest that this version of specgen knows", where=path, hint=_START_OVER)
        return cls(content)

    def write(self, output: str) -> None:
        """Write the manifest beside an output, in one step.

        Raises: InputError if that cannot be done.
        """
        text = json.dumps(self.content, indent=1, ensure_ascii=False)
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        replace_file(manifest_path(output), lambda stream: stream.write(data))

    def without_shard(self) -> "Manifest":
        """Return this manifest as one of a whole output."""
        return Manifest(self.content | {"shard": None})

    def value(self, key: str) -> Any:
        """Return the value of a recipe's key."""
        return self.content["recipe"].get(key, {}).get("value")

    @property
    def created(self) -> int:
        """When the output was begun, in seconds since 1970."""
        return calendar.timegm(time.strptime(self.content["created"], _TIME_FORMAT))

    def differences(self, new: "Manifest") -> tuple[list[str], list[str]]:
        """Return what differs from `new`: what would change the answers, and what only changes how they are made.

        What one of the two does not know yet is no difference.
        """
        content: list[str] = []
        speed: list[str] = []
        is_exact = all(one.value("speculation.method") == "exact" for one in (self, new))
        old_recipe, new_recipe = self.content["recipe"], new.content["recipe"]
        for key in dict.fromkeys((*old_recipe, *new_recipe)):
            was, is_now = self.value(key), new.value(key)
            # A key that one of them does not have is another version's; its default is what was done without it.
            is_known = key in old_recipe and key in new_recipe
            if not is_known and (old_recipe.get(key) or new_recipe[key])["origin"] == "default":
                continue
            if was != is_now:
                is_draft = key.startswith("speculation.") and key != "speculation.method"
                is_free = key in _FREE or (is_draft and is_exact)
                (speed if is_free else content).append(_change(key, was, is_now))
        for part in ("fingerprints", "resolved"):
            old_part, new_part = self.content[part], new.content[part]
            content += [
                _change(name, was, new_part[name])
                for name, was in old_part.items()
                if name in new_part and was != new_part[name]
            ]
        for name in ("form", "shard"):
            if self.content[name] != new.content[name]:
                content.append(_change(name, self.content[name], new.content[name]))
        return content, speed

    def begin_session(self, device: Mapping[str, object], changes: Sequence[str]) -> None:
        """Add the entry of a run that begins now on a device; changes: of speed, since the one before."""
        session = {
            "started": now(),
            "host": socket.gethostname(),
            "versions": versions(),
            "device": dict(device),
            "changed": list(changes),
        }
        self.content["complete"] = False
        self.content["sessions"].append(session)

    def note_session(self, results: Mapping[str, object]) -> None:
        """Add to the entry of the latest run."""
        if results:
            self.content["sessions"][-1] |= results


def manifest_path(output: str) -> str:
    """Return where the manifest of an output is."""
    return f"{output}.manifest.json"


def refusal(output: str, changes: list[str]) -> InputError:
    """Return the error of a run whose answers would not belong to those that are there."""
    return InputError(
        "the answers that are there were made with other settings: " + "; ".join(changes),
        where=output,
        hint="--fresh moves them aside and starts over; --output names another file",
    )


def _change(name: str, was: object, is_now: object) -> str:
    return f"{name} was {_shown(was)} and is {_shown(is_now)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def fingerprints(folder: Path, chat_template: str | None) -> dict[str, object]:
    """Return hashes of what a model folder gives to the answers: weights, tokenizer, chat template, configuration."""
    weights = sorted(folder.glob("*.safetensors"))
    return {
        "weights": _hash_of_weights(weights),
        "tokenizer": _hash_of_files(vocabulary_file(folder), folder / "tokenizer_config.json"),
        "model_config": _hash_of_files(folder / "config.json"),
        "generation_config": _hash_of_files(folder / "generation_config.json"),
        "chat_template": None if chat_template is None else hashlib.sha256(chat_template.encode()).hexdigest(),
    }


def _hash_of_files(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()


def _hash_of_weights(paths: list[Path]) -> str:
    """Sizes, and the bytes of small files; of large ones the beginning, which lists the tensors, and even samples."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for number in range(_NUM_PIECES):
                stream.seek(number * (size - _PIECE_BYTES) // (_NUM_PIECES - 1))
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that take part."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def now() -> str:
    """Return the time as ISO 8601, in UTC."""
    return time.strftime(_TIME_FORMAT, time.gmtime())


def _as_json(value: object) -> object:
    return json.loads(json.dumps(value))


class TimeSeries:
    """How counts grew over a run, at no more than some hundred moments however long it is.

    A point: seconds, samples that have ended, output tokens of all samples, drafted and accepted of those that ended.
    """

    def __init__(self) -> None:
        self._kept: list[list[float]] = []
        self._latest: list[float] = []
        self._spacing = 1.0

    def observe(self, progress: Progress) -> None:
        """Note the counts; they are kept if the last that are kept are long enough ago."""
        spec = progress.spec
        counts = [progress.samples_done, progress.completion_tokens, spec.drafted, spec.accepted]
        self._latest = [round(progress.seconds, 1), *counts]
        if self._kept and progress.seconds - self._kept[-1][0] < self._spacing:
            return
        self._kept.append(self._latest)
        if len(self._kept) > _MAX_POINTS:
            self._kept = self._kept[1::2]
            self._spacing *= 2

    @property
    def points(self) -> list[list[float]]:
        """What is kept, and the latest; that stands for the one before it if it is hardly later."""
        if not self._kept or self._latest is self._kept[-1]:
            return self._kept
        is_close = len(self._kept) > 1 and self._latest[0] - self._kept[-1][0] < self._spacing / 2
        return [*(self._kept[:-1] if is_close else self._kept), self._latest]
