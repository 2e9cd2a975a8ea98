"""Sampling defaults that a model's folder brings in generation_config.json, taken only if the recipe says so.

`model.generation_config: ignore` (the default) takes none: a value that the recipe and the row don't name is specgen's
own default. `use` takes each value that neither the recipe nor the command line names, one by one: to override one
leaves the others.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgen.errors import ModelError
from specgen.recipe import Recipe
from specgen.sampling_params import SamplingError, SamplingParams
from specgen.tokenizer import read_json

FILE = "generation_config.json"
# Its keys that have a meaning here, by ours. `do_sample` decides about the temperature.
_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
# What asks for another kind of generation, unless it has the value that switches it off.
_UNSUPPORTED = {"num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "guidance_scale": None}


def declared_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling values that the folder's generation_config.json declares, by our names.

    Raises: ModelError for a file that cannot be read.
    """
    content = read_json(folder / FILE)
    found = {ours: content[theirs] for theirs, ours in _KEYS.items() if content.get(theirs) is not None}
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def with_generation_config(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with the folder's sampling defaults, if it asks for them; their origin is the file.

    Raises: ModelError for a value that is out of range, or asks for what is not supported.
    """
    if recipe.model.generation_config != "use":
        return recipe
    content: Mapping[str, Any] = read_json(folder / FILE)
    for key, off in _UNSUPPORTED.items():
        if content.get(key, off) not in (off, None):
            raise ModelError(
                f"{key} = {content[key]!r} is not supported",
                where=str(folder / FILE),
                hint="leave model.generation_config at ignore",
            )
    taken = {
        name: value
        for name, value in declared_sampling(folder).items()
        if recipe.origins.get(f"sampling.{name}", "default") == "default"
    }
    try:
        checked: SamplingParams = dataclasses.replace(recipe.sampling, **taken)
    except SamplingError as error:
        raise ModelError(str(error), where=str(folder / FILE)) from None
    origins = {**recipe.origins, **{f"sampling.{name}": FILE for name in taken}}
    return dataclasses.replace(recipe, sampling=checked, origins=origins)
