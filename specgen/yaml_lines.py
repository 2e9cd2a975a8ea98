"""YAML that keeps its line numbers: a safe loader that refuses duplicate keys and says where everything stands.

Knows files, lines and YAML's errors; does not know which keys a recipe has.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from specgen.errors import RecipeError

_QUOTES = "a text that begins with *, {, [, % or @, has a colon and a space in it, or is a lone - needs quotes"


class _Loader(yaml.SafeLoader):
    """A safe loader whose numbers are those that everybody expects, not YAML 1.1's.

    1e-3 is a number. 010 (8 in YAML 1.1), 1:30 (90), 2026-01-31 (a date) and = (no value at all) are texts, which is an
    error where a number is due.
    """


_OTHERWISE_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp", "value"))
_Loader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in rules if tag not in _OTHERWISE_TAGS]
    for key, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+|[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """A safe dumper that puts texts into quotes which `_Loader`, or another YAML, would read as something else."""


_Dumper.yaml_implicit_resolvers = {
    key: [*_Loader.yaml_implicit_resolvers.get(key, ()), *yaml.SafeLoader.yaml_implicit_resolvers.get(key, ())]
    for key in {*_Loader.yaml_implicit_resolvers, *yaml.SafeLoader.yaml_implicit_resolvers}
}


def parse_value(text: str, where: str) -> object:
    """Return the value that a piece of YAML stands for; a lone - (stdin) is a text, as in no place it begins a list.

    Raises: RecipeError at `where`.
    """
    if text.strip() == "-":
        return "-"
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"the value is not valid YAML: {_one_line(error)}", where=where, hint=_QUOTES) from None


def compose(path: Path) -> yaml.Node | None:
    """Return the root node of a YAML file, None if it says nothing.

    Raises: RecipeError if it cannot be read or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError("there is no such recipe file", where=str(path)) from None
    except IsADirectoryError:
        raise RecipeError("this is a folder, not a recipe file", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"the recipe is not UTF-8 text: {error}", where=str(path)) from None
    except OSError as error:
        raise RecipeError(f"the recipe cannot be read: {error.strerror}", where=str(path)) from None
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = error.problem or error.context
        raise RecipeError(f"the recipe is not valid YAML: {problem}", where=where, hint=_QUOTES) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"the recipe is not valid YAML: {_one_line(error)}", where=str(path)) from None


def items(node: yaml.Node, path: Path, parent: str) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield (key, value node, line of the key) of a mapping node.

    Raises: RecipeError for a duplicate key, or for a node that is no mapping.
    """
    what = f"section {parent!r}" if parent else "the recipe"
    if not isinstance(node, yaml.MappingNode):
        where = f"{path}:{node.start_mark.line + 1}"
        raise RecipeError(f"{what} must be a mapping (key: value lines)", where=where)
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key_node.tag == "tag:yaml.org,2002:merge":
            raise RecipeError("merge keys (<<) are not read", where=f"{path}:{line}", hint="write its keys out")
        full = f"{parent}.{key}" if parent else key
        if key in seen:
            raise RecipeError(f"{full} is given twice, first in line {seen[key]}", where=f"{path}:{line}")
        seen[key] = line
        yield key, value, line


def is_null(node: yaml.Node) -> bool:
    """Return whether a node says nothing (a section with all its keys commented out)."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def construct(node: yaml.Node, path: Path) -> object:
    """Return the value of a node.

    Raises: RecipeError at its line.
    """
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = f"{path}:{node.start_mark.line + 1}"
        raise RecipeError(f"this value is not valid: {_one_line(error)}", where=where) from None


def _one_line(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    return " ".join(str(problem or error).split())


def dump_scalar(value: object) -> str:
    """Return a recipe value as one line of YAML that loads as the same value."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a recipe holds no {value}")
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    # YAML would write a text with line ends over several lines, except as JSON does
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
