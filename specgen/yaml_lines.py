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

_QUOTES = "a text that begins with *, {, [, % or @, or has a colon and a space in it, needs quotes"


class _Loader(yaml.SafeLoader):
    """A safe loader that reads 1e-3 as a number, as everybody expects and YAML 1.1 does not."""


_Loader.yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def parse_value(text: str, where: str) -> object:
    """Return the value that a piece of YAML stands for.

    Raises: RecipeError at `where`.
    """
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
    text = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    # YAML would write a text with line ends over several lines, except as JSON does
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
