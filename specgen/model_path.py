"""From `model.path` to a folder on this machine: a known name, a folder, or a hub id that is fetched.

Knows names and files; does not open weights.
"""

import re
from pathlib import Path

from specgen import checks
from specgen.errors import ModelError
from specgen.packaged_models import PACKAGED, packaged_folder

ASSETS = Path(__file__).parent / "assets"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "tiktoken.model"]


def bundled_models() -> list[str]:
    """Return the names of the models that come with the package, sorted."""
    return sorted(name for name, folder in _assets().items() if (folder / "model.safetensors").is_file())


def bundled_heads() -> list[str]:
    """Return the names of the draft heads that come with the package, sorted."""
    return sorted(name for name, folder in _assets().items() if (folder / "mtp.safetensors").is_file())


def known_names() -> list[str]:
    """Return every name that stands for a model or a head without being a folder or a hub id, sorted."""
    return sorted([*_assets(), *PACKAGED])


def _assets() -> dict[str, Path]:
    return {folder.name: folder for folder in ASSETS.iterdir() if (folder / "config.json").is_file()}


def resolve_model(path: str) -> Path:
    """Return the folder of a model: of a bundled or packaged one by its name, else a folder, else a hub id's snapshot.

    Fetches from the hub (safetensors, json and tokenizer files only) if the id is not in the local cache; `id@revision`
    names a revision.

    Raises: ModelError if there is no such model, or the folder holds no config.json.
    """
    if path in PACKAGED:
        return packaged_folder(path)
    return _resolve(path, "model.path", bundled_models(), [*bundled_models(), *PACKAGED])


def resolve_head(path: str) -> Path:
    """Return the folder of a draft head, as `resolve_model` does for a model.

    Raises: ModelError.
    """
    return _resolve(path, "speculation.model", bundled_heads(), bundled_heads())


def _resolve(path: str, key: str, bundled: list[str], known: list[str]) -> Path:
    if path in bundled:
        return ASSETS / path
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _with_config(folder, path)
    if folder.exists():
        raise ModelError(f"{key} {path!r} is a file, not a folder")
    hub_id, _, revision = path.partition("@")
    if not HUB_ID.fullmatch(hub_id):
        close = checks.nearest(path, known)
        hint = f"did you mean {close!r}?" if close else f"known names: {', '.join(known)}"
        raise ModelError(f"there is no model folder {path!r}", hint=hint)
    return _with_config(_from_hub(hub_id, revision or None), path)


def _with_config(folder: Path, path: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {path!r} has no config.json", where=str(folder))
    return folder


def _from_hub(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's errors alike
        cause = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model {hub_id!r} is no folder and could not be had from the hub: {cause}",
            hint="is there a folder of that name, is the id right, is the network there?",
        ) from error
