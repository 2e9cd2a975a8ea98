"""From `model.path` to a folder on this machine: a bundled model's name, a folder, or a hub id that is fetched.

Knows names and files; does not open weights.
"""

import re
from pathlib import Path

from specgen import checks
from specgen.errors import ModelError

ASSETS = Path(__file__).parent / "assets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer*"]


def bundled_models() -> list[str]:
    """Return the names of the models that come with the package, sorted."""
    return sorted(folder.name for folder in ASSETS.iterdir() if (folder / "config.json").is_file())


def resolve_model(path: str) -> Path:
    """Return the folder of a model: of a bundled one by its name, else a folder, else a hub id's snapshot.

    Fetches from the hub (safetensors, json and tokenizer files only) if the id is not in the local cache.

    Raises: ModelError if there is no such model, or the folder holds no config.json.
    """
    names = bundled_models()
    if path in names:
        return ASSETS / path
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _with_config(folder, path)
    if folder.exists():
        raise ModelError(f"model.path {path!r} is a file, not a folder")
    if not _HUB_ID.fullmatch(path):
        close = checks.nearest(path, names)
        hint = f"did you mean {close!r}?" if close else f"bundled models: {', '.join(names)}"
        raise ModelError(f"there is no model folder {path!r}", hint=hint)
    return _with_config(_from_hub(path), path)


def _with_config(folder: Path, path: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {path!r} has no config.json", where=str(folder))
    return folder


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's errors alike
        cause = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model {hub_id!r} is no folder and could not be had from the hub: {cause}",
            hint="is there a folder of that name, is the id right, is the network there?",
        ) from error
