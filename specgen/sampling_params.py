"""How a row's tokens are chosen and when it ends: one frozen record, checked when it is made.

Knows the ranges and how a row's overrides are laid over the recipe's defaults. Does not know logits, nor the seed a row
really gets (`seeds.py`). Nothing comes from the model folder's generation_config: a value not written is the default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from specgen import checks
from specgen.errors import SpecgenError


class SamplingError(SpecgenError):
    """A sampling parameter is unknown, of the wrong type or out of range."""

    code = "bad_sampling"


def _param(default: Any, check: checks.Check) -> Any:
    return field(default=default, metadata={"check": check})


_PENALTY = checks.number(-2.0, 2.0, wanted="a number from -2 to 2")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one row, each within its range.

    temperature: 0 picks the likeliest token. top_k: 0 is off. top_p: 1 is off. repetition_penalty: over prompt and
    output, 1 is off. frequency_penalty, presence_penalty: over the output, 0 is off. max_tokens: None is "to the
    model's limit". ignore_eos: EOS ids do not end the row. stop_token_ids: further ids that do. seed: None is "none".

    Raises: SamplingError naming the parameter, the value and what is allowed.
    """

    # The bounds of temperature and repetition_penalty keep logit / value finite in float32.
    temperature: float = _param(
        1.0, checks.number(1e-6, 1e6, wanted="0, or a number from 0.000001 to 1000000", zero=True)
    )
    top_k: int = _param(0, checks.integer(0, 2**31 - 1, wanted="an integer from 0 (off) up"))
    top_p: float = _param(1.0, checks.number(1e-30, 1.0, wanted="a number above 0 and up to 1 (off)"))
    repetition_penalty: float = _param(
        1.0, checks.number(1e-6, 1e6, wanted="a number from 0.000001 to 1000000 (1 is off)")
    )
    frequency_penalty: float = _param(0.0, _PENALTY)
    presence_penalty: float = _param(0.0, _PENALTY)
    max_tokens: int | None = _param(
        None,
        checks.optional(checks.integer(1, 2**31 - 1, wanted="an integer from 1 up"), "null, to the model's limit,"),
    )
    ignore_eos: bool = _param(False, checks.boolean())
    stop_token_ids: tuple[int, ...] = _param((), checks.token_ids())
    seed: int | None = _param(
        None, checks.optional(checks.integer(0, 2**63 - 1, wanted="an integer from 0 to 2^63 - 1"), "null, not given,")
    )

    def __post_init__(self) -> None:
        """Put each value into its proper type, or raise."""
        for name in PARAM_NAMES:
            object.__setattr__(self, name, checked_param(name, getattr(self, name)))


_CHECKS: dict[str, checks.Check] = {f.name: f.metadata["check"] for f in fields(SamplingParams)}
PARAM_NAMES: tuple[str, ...] = tuple(_CHECKS)


def checked_param(name: str, value: object, where: str | None = None) -> Any:
    """Return `value` in the proper type for the parameter `name`.

    Raises: SamplingError at `where`.
    """
    check = _CHECKS.get(name)
    if check is None:
        close = checks.nearest(str(name), PARAM_NAMES)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(PARAM_NAMES)}"
        raise SamplingError(f"unknown sampling parameter {name!r}", where=where, hint=hint)
    try:
        return check(value)
    except ValueError as error:
        raise SamplingError(f"{name} {error}", where=where) from None


def merged(defaults: SamplingParams, overrides: Mapping[str, object], where: str | None = None) -> SamplingParams:
    """Return `defaults` with a row's `overrides` laid over them; none of these is dropped.

    Raises: SamplingError at `where` for an unknown name (with the nearest real one) or a bad value.
    """
    if not overrides:
        return defaults
    return replace(defaults, **{name: checked_param(name, value, where) for name, value in overrides.items()})
