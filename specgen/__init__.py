"""specgen turns a file of prompts into a file of answers, with multi-token prediction as a matter of speed alone.

Knows its own version and its door for programs: `generate`, and what that raises. Imports nothing heavy, so that
`specgen --help` is quick.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import SpecgenError

if TYPE_CHECKING:
    from specgen.recipe import Recipe

try:
    __version__ = version("specgen")
except PackageNotFoundError:  # the source tree is on the path without having been installed
    __version__ = "0.0.0+unknown"

__all__ = ["SpecgenError", "__version__", "generate"]


def generate(
    rows: Iterable[Mapping[str, Any] | str], recipe: "Recipe | Mapping[str, Any] | str | Path"
) -> Iterator[dict[str, Any]]:
    """Yield the record of every answer to `rows`, see `specgen.job.generate.generate`."""
    from specgen.job.generate import generate as run

    return run(rows, recipe)
