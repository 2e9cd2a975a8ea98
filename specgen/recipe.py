"""The recipe: the only configuration there is, as frozen records of values that were checked when they were made.

Knows every key and, once loaded, the origin of its value; what a key may be is its section's to know
(`recipe_sections.py`, `sampling_params.py`). Does not know YAML (`yaml_lines.py`) nor what a model's limits are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from specgen import checks, yaml_lines
from specgen.errors import RecipeError
from specgen.model_path import HUB_ID, known_names
from specgen.recipe_sections import EngineSection, InputSection, ModelSection, OutputSection, SpeculationSection
from specgen.sampling_params import SamplingError, SamplingParams
from specgen.seeds import draw_seed


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole job, decided: which model, how rows are sampled, where they come from and go to.

    origins: key path -> where its value came from ("default", "recipes/x.yaml:7", "--set", "command line", "drawn").
    """

    model: ModelSection = field(default_factory=ModelSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    input: InputSection = field(default_factory=InputSection)
    output: OutputSection = field(default_factory=OutputSection)
    engine: EngineSection = field(default_factory=EngineSection)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def values(self) -> dict[str, Any]:
        """Return every value by its key path, in the order of the recipe's sections."""
        return {path: getattr(getattr(self, path.split(".")[0]), path.split(".")[1]) for path in KEYS}

    def to_yaml_with_origins(self) -> str:
        """Return a recipe file that says the same as this one, with every value's origin as a comment beside it."""
        lines: list[str] = []
        for path, value in self.values().items():
            section, name = path.split(".")
            if not lines or f"{section}:" not in lines:
                lines.append(f"{section}:")
            lines.append(
                f"  {name}: {yaml_lines.dump_scalar(value)}".ljust(40) + f"  # {self.origins.get(path, 'default')}"
            )
        return "\n".join(lines) + "\n"


SECTIONS: dict[str, Any] = {
    "model": ModelSection,
    "speculation": SpeculationSection,
    "sampling": SamplingParams,
    "input": InputSection,
    "output": OutputSection,
    "engine": EngineSection,
}
# Key path -> the check of its value, for every key of a recipe.
KEYS: dict[str, checks.Check] = {
    f"{name}.{item.name}": item.metadata["check"] for name, section in SECTIONS.items() for item in fields(section)
}


class _Setting(NamedTuple):
    """One value as it was written: key path, value, and its origin ("x.yaml:7", "--set", "command line")."""

    path: str
    value: object
    origin: str


def load_recipe(
    path: str | Path,
    sets: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    *,
    for_bench: bool = False,
) -> Recipe:
    """Return a file's recipe with `sets` ("a.b=c", c is YAML), then `overrides` (key path -> value) laid over it.

    A relative input.path, or a model.path that is a folder, is taken from the recipe's own folder when the file says
    it, and from the current directory when `sets` or `overrides` do; output.path always from the current directory.
    A seed that nobody gave is drawn, so that the run can be repeated from the written recipe. Synthetic acceptance is
    refused unless the recipe is `for_bench`.

    Raises: RecipeError with the key path, file:line and the nearest real key.
    """
    path = Path(path)
    settings = [*_file_settings(path), *map(_parse_set, sets)]
    settings += [_Setting(key, value, "command line") for key, value in (overrides or {}).items()]
    return _resolve(settings, path.parent, for_bench)


def recipe_from_settings(
    sets: Sequence[str] = (),
    defaults: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    for_bench: bool = False,
) -> Recipe:
    """Return a recipe made without a file: `defaults`, then `sets`, then `overrides`, as `load_recipe` lays them.

    Paths are from the current directory.

    Raises: RecipeError.
    """
    settings = [_Setting(key, value, "default") for key, value in (defaults or {}).items()]
    settings += map(_parse_set, sets)
    settings += [_Setting(key, value, "command line") for key, value in (overrides or {}).items()]
    return _resolve(settings, Path(), for_bench)


def _resolve(settings: Sequence[_Setting], folder: Path, for_bench: bool) -> Recipe:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        value = _checked(setting)
        if setting.origin not in ("--set", "command line"):
            value = _from_folder(setting.path, value, folder)
        values[setting.path] = value
        origins[setting.path] = setting.origin
    if values.get("sampling.seed") is None:
        values["sampling.seed"] = draw_seed()
        origins["sampling.seed"] = "drawn"
    sections = {name: _section(name, values, origins) for name in SECTIONS}
    recipe = Recipe(**sections, origins={key: origins.get(key, "default") for key in KEYS})
    _check_acceptance(recipe, for_bench)
    _check_adaptive(recipe)
    _check_prompt(recipe)
    return recipe


def _section(name: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> Any:
    """Return a section of the values that were given; two that do not go together are an error where they stand."""
    given = {key.split(".")[1]: value for key, value in values.items() if key.split(".")[0] == name}
    try:
        return SECTIONS[name](**given)
    except SamplingError as error:
        places = [origins[f"{name}.{key}"] for key in given if key in error.message.split()]
        where = ", ".join(dict.fromkeys(places)) or None
        raise SamplingError(f"{name}.{error.message}", where=where) from None


def _check_prompt(recipe: Recipe) -> None:
    """Raise if several keys say what the prompt is."""
    section = recipe.input
    given = [f"input.{name}" for name in ("messages", "template") if getattr(section, name) is not None]
    given += ["input.prompt"] if section.prompt != "prompt" else []
    if len(given) > 1:
        raise RecipeError(
            f"{given[0]} and {given[1]} both say what the prompt is: one of them is enough",
            where=recipe.origins[given[0]],
        )


def _check_adaptive(recipe: Recipe) -> None:
    """Raise if the number of drafts, which would follow a clock, could be seen in the answers."""
    if recipe.speculation.adaptive and recipe.speculation.method == "ratio":
        raise RecipeError(
            "speculation.adaptive can't go with speculation.method: ratio: answers would depend on how long steps take",
            where=recipe.origins["speculation.adaptive"],
            hint="leave one of the two out; with method: exact the number of drafts never changes a token",
        )


def _check_acceptance(recipe: Recipe, for_bench: bool) -> None:
    """Raise unless synthetic acceptance is asked for as a whole, by a benchmark, or not at all."""
    speculation, origins = recipe.speculation, recipe.origins
    if speculation.method != "synthetic":
        if speculation.acceptance is not None:
            raise RecipeError(
                "speculation.acceptance has no effect here",
                where=origins["speculation.acceptance"],
                hint="it goes with speculation.method: synthetic, in specgen bench",
            )
        return
    where = origins["speculation.method"]
    if not for_bench:
        raise RecipeError(
            "speculation.method: synthetic accepts drafts by lot: its answers are no answers of the model",
            where=where,
            hint="it is for specgen bench only; leave speculation.method out",
        )
    if speculation.acceptance is None or len(speculation.acceptance) < speculation.num_tokens:
        raise RecipeError(
            f"speculation.method: synthetic needs {speculation.num_tokens} rates, one a draft",
            where=where,
            hint="give them as speculation.acceptance: [0.85, 0.7, 0.55]",
        )


def _checked(setting: _Setting) -> Any:
    check = KEYS.get(setting.path)
    if check is None:
        raise RecipeError(f"unknown key {setting.path!r}", where=setting.origin, hint=_hint_for(setting.path))
    try:
        return check(setting.value)
    except ValueError as error:
        raise RecipeError(f"{setting.path} {error}", where=setting.origin) from None


def _hint_for(path: str) -> str:
    section, _, name = path.partition(".")
    if path in KEYS:  # only from a file, which has it as one dotted key
        return f"write it as {name}: under {section}:"
    if path in SECTIONS:  # only from --set, or a program
        return f"it is a section: name one of its keys, like {next(key for key in KEYS if key.startswith(f'{path}.'))}"
    siblings = [key for key in KEYS if key.startswith(f"{section}.")]
    last = path.rpartition(".")[2]
    elsewhere = [key for key in KEYS if key.endswith(f".{last}")]
    if elsewhere:
        return f"did you mean '{checks.nearest(path, elsewhere, cutoff=0.0)}'?"
    if siblings:
        close = checks.nearest(name, [key.split(".")[1] for key in siblings])
        if close:
            return f"did you mean '{section}.{close}'?"
    names = (KEYS, SECTIONS) if "." in path else (SECTIONS, KEYS)
    close = checks.nearest(path, names[0]) or checks.nearest(path, names[1])
    if close:
        return f"did you mean '{close}'?"
    known = [key.split(".")[1] for key in siblings] or list(SECTIONS)
    return f"known here: {', '.join(known)}"


def _from_folder(path: str, value: Any, folder: Path) -> Any:
    if path == "input.path" and isinstance(value, tuple):
        return tuple(_from_folder(path, item, folder) for item in value)
    if not isinstance(value, str):
        return value
    if path == "input.path" and value != "-" and not _is_hub_id(value, folder):
        return str((folder / Path(value).expanduser()).absolute())
    if path == "input.chat_template":
        return str((folder / Path(value).expanduser()).absolute())
    is_model = path in ("model.path", "speculation.model") and value not in known_names()
    if is_model and (folder / Path(value).expanduser()).is_dir():
        return str((folder / Path(value).expanduser()).absolute())
    return value


def _is_hub_id(value: str, folder: Path) -> bool:
    """Whether an input's path names a dataset of the hub: owner/name, and nothing in the folder."""
    return HUB_ID.fullmatch(value) is not None and not Path(value).suffix and not (folder / value).exists()


def _parse_set(text: str) -> _Setting:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise RecipeError(f"{text!r} is not of the form section.key=value", where="--set")
    return _Setting(path.strip(), yaml_lines.parse_value(value, f"--set {path.strip()}"), "--set")


def _file_settings(path: Path) -> Iterator[_Setting]:
    """Yield each `section.key` of the file, in file order, with its line."""
    root = yaml_lines.compose(path)
    if root is None:
        raise RecipeError("the recipe is empty", where=str(path), hint="it needs at least model.path")
    for section, node, line in yaml_lines.items(root, path, ""):
        if section not in SECTIONS:
            raise RecipeError(f"unknown key {section!r}", where=f"{path}:{line}", hint=_hint_for(section))
        if yaml_lines.is_null(node):
            continue
        for name, child, child_line in yaml_lines.items(node, path, section):
            yield _Setting(f"{section}.{name}", yaml_lines.construct(child, path), f"{path}:{child_line}")
