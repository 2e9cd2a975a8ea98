"""What several commands share: their arguments."""

import enum
from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)]
InputFile = Annotated[
    str | None, typer.Argument(help="Rows to run instead of the recipe's input.path; - is stdin.", show_default=False)
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key of the recipe; may be repeated."),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the figures there, as JSON (an old file is replaced); - is stdout."
    ),
]


class ProgressMode(enum.Enum):
    """How a command shows where it stands."""

    AUTO = "auto"
    LINES = "lines"
    JSON = "json"
    NONE = "none"


Progress = Annotated[
    ProgressMode,
    typer.Option(
        help="auto: a live view on a terminal, a line every 5 seconds elsewhere. lines: those anywhere. json: an object"
        " every 5 seconds and at the end. All on stderr."
    ),
]
