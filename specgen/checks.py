"""Checks of single values from recipes and rows: each returns the value in its proper type or says what it must be.

A check is a function `value -> value` that raises ValueError with the tail of a sentence ("must be …, not …"); whoever
calls it knows the name and place and puts them in front. bool is never a number, NaN and infinity are never allowed.
"""

import difflib
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[object], Any]
MAX_DEPTH = 100  # of values within values: what holds itself has no end, and recursion has a limit


def shown(value: object) -> str:
    """Return the value as it is shown in a message: null, true and false as YAML and JSON have them, of others their
    repr, cut to 60 characters.
    """
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most like `name`, or None if none is alike (difflib ratio below `cutoff`)."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None


def is_too_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Return whether lists and objects stand in each other more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_too_deep(item, levels - 1) for item in items)


def _refuse(wanted: str, value: object) -> ValueError:
    return ValueError(f"must be {wanted}, not {shown(value)}")


def number(low: float, high: float, *, wanted: str, zero: bool = False) -> Check:
    """Return a check for a finite number in [low, high] (or 0, if `zero`), which gives it back as float."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(wanted, value)
        try:
            result = float(value)
        except OverflowError:
            raise _refuse(wanted, value) from None
        if not math.isfinite(result) or not (low <= result <= high or (zero and result == 0.0)):
            raise _refuse(wanted, value)
        return result + 0.0  # -0.0 becomes 0.0

    return check


def integer(low: int, high: int | None, *, wanted: str) -> Check:
    """Return a check for an int in [low, high]."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(wanted, value)
        if value < low or (high is not None and value > high):
            raise _refuse(wanted, value)
        return value

    return check


def boolean() -> Check:
    """Return a check for true or false."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise _refuse("true or false", value)
        return value

    return check


def text(wanted: str = "a text that is not empty") -> Check:
    """Return a check for a string with something in it."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise _refuse(wanted, value)
        return value

    return check


def choice(*allowed: str) -> Check:
    """Return a check for one of a few words."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        close = nearest(value, allowed) if isinstance(value, str) else None
        raise ValueError(
            f"must be {' or '.join(allowed)}, not {shown(value)}" + (f": did you mean {close!r}?" if close else "")
        )

    return check


def optional(inner: Check, wanted: str) -> Check:
    """Return a check that lets None pass and hands the rest to `inner`; `wanted` says what None means, if not ""."""

    def check(value: object) -> object:
        if value is None:
            return None
        try:
            return inner(value)
        except ValueError as error:
            raise ValueError(f"{error} ({wanted} is allowed too)" if wanted else str(error)) from None

    return check


def names(wanted: str) -> Check:
    """Return a check for a list of texts, none of them empty, which gives it back as a tuple."""

    def check(value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
            raise _refuse(wanted, value)
        return tuple(value)

    return check


def rates() -> Check:
    """Return a check for a list of numbers from 0 to 1, none above the one before it; gives it back as a tuple."""
    wanted = "a list of numbers from 0 to 1 that do not rise, like [0.85, 0.7, 0.55]"
    rate = number(0.0, 1.0, wanted=wanted)

    def check(value: object) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise _refuse(wanted, value)
        found = tuple(rate(item) for item in value)
        if any(later > earlier for earlier, later in itertools.pairwise(found)):
            raise _refuse(wanted, value)
        return found

    return check


def token_ids() -> Check:
    """Return a check for a list of token ids (ints from 0 to 2^31 - 1), which gives it back as a tuple."""
    wanted = "a list of token ids (integers from 0 to 2147483647)"

    def check(value: object) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise _refuse(wanted, value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
                raise _refuse(wanted, value)
        return tuple(value)

    return check


def text_or_texts(wanted: str) -> Check:
    """Return a check for a text with something in it, or a list of such texts, which it gives back as a tuple."""
    one, several = text(wanted), names(wanted)

    def check(value: object) -> object:
        if isinstance(value, str) or not value:
            return one(value)
        return several(value)

    return check


def mapping(wanted: str) -> Check:
    """Return a check for an object that JSON can hold: it is written down, and compared with what was written."""

    def check(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or not _is_json(value):
            raise _refuse(f"{wanted}, with texts as keys and nothing in it that JSON cannot hold", value)
        return dict(value)

    return check


def _is_json(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict):
        return depth < MAX_DEPTH and all(isinstance(k, str) and _is_json(v, depth + 1) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return depth < MAX_DEPTH and all(_is_json(item, depth + 1) for item in value)
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
