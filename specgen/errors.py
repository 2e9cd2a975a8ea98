"""What can go wrong through no fault of ours: one error class, with what, where and what to do.

Subclasses exist only where code branches on them. Nothing here prints or exits: the command line does.
"""


class SpecgenError(Exception):
    """A mistake in what the user gave us, or a limit of the machine: its text is fit to be shown as it is.

    message: what is wrong. where: file:line, key path or row. hint: what to do about it.
    code: a short slug (`bad_recipe`, `prompt_too_long`) that goes into error records.
    """

    code = "error"

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Return where, what and the hint as one readable text."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class RecipeError(SpecgenError):
    """The recipe, a `--set` value or a flag is wrong."""

    code = "bad_recipe"


class InputError(SpecgenError):
    """The input or output file as a whole cannot be used (missing, empty, the same file, already there)."""

    code = "bad_input"


class RowError(SpecgenError):
    """One row cannot be run; the others go on."""

    code = "bad_row"


class ModelError(SpecgenError):
    """The model folder is missing, incomplete or not of a kind that is supported."""

    code = "bad_model"


class EngineError(SpecgenError):
    """The engine stopped: its loop died, or the machine cannot hold what the recipe asks for."""

    code = "engine"


class EngineStuckError(EngineError):
    """The engine makes no progress and cannot be waited for. dump: what it was doing, as text."""

    code = "engine_stuck"

    def __init__(self, message: str, *, hint: str | None = None, dump: str = "") -> None:
        super().__init__(message, hint=hint)
        self.dump = dump
