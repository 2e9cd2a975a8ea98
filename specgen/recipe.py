"""The recipe: the only configuration there is, as frozen records of values that were checked when they were made.

Knows every key, its type, range, default and, once loaded, the origin of its value. Does not know YAML
(`yaml_lines.py`) nor what a model's limits are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from specgen import checks, yaml_lines
from specgen.errors import RecipeError
from specgen.model_path import bundled_models
from specgen.sampling_params import SamplingParams
from specgen.seeds import draw_seed

# Keys that people will look for and that this version does not have.
_LATER = {
    "input.messages": "chat messages are not supported by this version: give raw text under input.prompt",
    "speculation.acceptance": "synthetic acceptance is not supported by this version",
}


def _key(default: Any, check: checks.Check) -> Any:
    return field(default=default, metadata={"check": check})


def _count(unit: str) -> checks.Check:
    return checks.integer(1, 2**31 - 1, wanted=f"an integer from 1 up ({unit})")


def _check_fields(section: Any, name: str) -> None:
    for item in fields(section):
        try:
            object.__setattr__(section, item.name, item.metadata["check"](getattr(section, item.name)))
        except ValueError as error:
            raise RecipeError(f"{name}.{item.name} {error}") from None


@dataclass(frozen=True, slots=True)
class ModelSection:
    """path: a bundled model's name, a folder or a hub id. dtype and device: `auto` picks what the machine does well."""

    path: str | None = _key(None, checks.optional(checks.text("a bundled model's name, a folder or a hub id"), ""))
    dtype: str = _key("auto", checks.choice("auto", "float32", "bfloat16"))
    device: str = _key("auto", checks.choice("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "model")


@dataclass(frozen=True, slots=True)
class SpeculationSection:
    """num_tokens: drafts a step (K), 0 is plain decoding. method: how drafts are judged."""

    num_tokens: int = _key(3, checks.integer(0, 16, wanted="an integer from 0 (plain decoding) to 16"))
    method: str = _key("exact", checks.choice("exact", later=("ratio", "synthetic")))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "speculation")


@dataclass(frozen=True, slots=True)
class InputSection:
    """path: a JSONL file or `-` for stdin. prompt, id: names of columns. limit: only the first so many rows.

    keep: columns of the user's own whose names are, or nearly are, sampling parameters: without it they are taken for
    misplaced ones.
    """

    path: str | None = _key(None, checks.optional(checks.text("a file, or - for stdin"), ""))
    prompt: str = _key("prompt", checks.text("the name of a column"))
    id: str = _key("id", checks.text("the name of a column"))
    limit: int | None = _key(None, checks.optional(_count("rows"), "null, all rows,"))
    keep: tuple[str, ...] = _key((), checks.names("a list of names of columns"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "input")


@dataclass(frozen=True, slots=True)
class OutputSection:
    """path: a JSONL file or `-` for stdout. order: of lines. on_error: of a bad row. token_ids: whether to add ids."""

    path: str | None = _key(None, checks.optional(checks.text("a file, or - for stdout"), ""))
    order: str = _key("input", checks.choice("input", "completion"))
    on_error: str = _key("record", checks.choice("record", "stop"))
    token_ids: bool = _key(False, checks.boolean())

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "output")


@dataclass(frozen=True, slots=True)
class EngineSection:
    """The engine's size and manner.

    max_num_seqs: rows at once. max_num_batched_tokens: tokens a step. max_model_len: prompt and answer together, None
    is the model's own limit. block_size: tokens of a KV block. num_blocks: None measures what fits into memory_fraction
    of the memory. async_scheduling: schedule a step while the last one runs; None is on with a GPU, where they overlap.
    cuda_graphs: decode steps as one launch each, on a GPU.
    """

    max_num_seqs: int = _key(64, _count("rows at once"))
    max_num_batched_tokens: int = _key(4096, _count("tokens a step"))
    max_model_len: int | None = _key(
        None,
        checks.optional(checks.integer(2, 2**31 - 1, wanted="an integer from 2 up (tokens)"), "null, the model's own,"),
    )
    block_size: int = _key(16, checks.integer(1, 1024, wanted="an integer from 1 to 1024 (tokens)"))
    num_blocks: int | None = _key(None, checks.optional(_count("blocks"), "null, measured,"))
    memory_fraction: float = _key(0.85, checks.number(1e-6, 1.0, wanted="a number above 0 and up to 1"))
    enable_prefix_caching: bool = _key(True, checks.boolean())
    async_scheduling: bool | None = _key(None, checks.optional(checks.boolean(), "null, on with a GPU,"))
    cuda_graphs: bool = _key(True, checks.boolean())
    exactness: str = _key("exact", checks.choice("exact", later=("fast",)))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "engine")


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


def load_recipe(path: str | Path, sets: Sequence[str] = (), overrides: Mapping[str, object] | None = None) -> Recipe:
    """Return a file's recipe with `sets` ("a.b=c", c is YAML), then `overrides` (key path -> value) laid over it.

    A relative input.path, or a model.path that is a folder, is taken from the recipe's own folder when the file says
    it, and from the current directory when `sets` or `overrides` do; output.path always from the current directory.
    A seed that nobody gave is drawn, so that the run can be repeated from the written recipe.

    Raises: RecipeError with the key path, file:line and the nearest real key.
    """
    path = Path(path)
    settings = [*_file_settings(path), *map(_parse_set, sets)]
    settings += [_Setting(key, value, "command line") for key, value in (overrides or {}).items()]
    return _resolve(settings, path.parent)


def recipe_from_settings(
    sets: Sequence[str] = (),
    defaults: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Recipe:
    """Return a recipe made without a file: `defaults`, then `sets`, then `overrides`, as `load_recipe` lays them.

    Paths are from the current directory.

    Raises: RecipeError.
    """
    settings = [_Setting(key, value, "default") for key, value in (defaults or {}).items()]
    settings += map(_parse_set, sets)
    settings += [_Setting(key, value, "command line") for key, value in (overrides or {}).items()]
    return _resolve(settings, Path())


def _resolve(settings: Sequence[_Setting], folder: Path) -> Recipe:
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
    sections = {
        name: section(**{key.split(".")[1]: value for key, value in values.items() if key.split(".")[0] == name})
        for name, section in SECTIONS.items()
    }
    return Recipe(**sections, origins={key: origins.get(key, "default") for key in KEYS})


def _checked(setting: _Setting) -> Any:
    check = KEYS.get(setting.path)
    if check is None:
        raise RecipeError(f"unknown key {setting.path!r}", where=setting.origin, hint=_hint_for(setting.path))
    try:
        return check(setting.value)
    except ValueError as error:
        raise RecipeError(f"{setting.path} {error}", where=setting.origin) from None


def _hint_for(path: str) -> str:
    if path in _LATER:
        return _LATER[path]
    section, _, name = path.partition(".")
    if path in KEYS:  # only from a file, which has it as one dotted key
        return f"write it as {name}: under {section}:"
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
    if not isinstance(value, str):
        return value
    if path == "input.path" and value != "-":
        return str((folder / Path(value).expanduser()).absolute())
    if path == "model.path" and value not in bundled_models() and (folder / Path(value).expanduser()).is_dir():
        return str((folder / Path(value).expanduser()).absolute())
    return value


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
