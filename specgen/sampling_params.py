"""How a row's tokens are chosen and when it ends: one frozen record, checked when it is made.

Knows the ranges and how a row's overrides are laid over the recipe's defaults. Does not know logits, nor the seed a row
really gets (`seeds.py`). Nothing comes from the model folder's generation_config: a value not written is the default.
"""

from collections.abc import Iterable, Iterator, Mapping
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
# Every request slot has room for so many on the device.
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 4096  # of all bad words together
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of id and bias in the order of ids; an id may be a text, as JSON's keys are."""
    bias = checks.number(-100.0, 100.0, wanted="a number from -100 to 100")
    wanted = f"an object of at most {MAX_LOGIT_BIASES} token ids and biases from -100 to 100"
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value):
        pairs = [tuple(pair) for pair in value]
    else:
        raise ValueError(f"must be {wanted}, not {checks.shown(value)}")
    if len(pairs) > MAX_LOGIT_BIASES:
        raise ValueError(f"must be {wanted}, not one of {len(pairs)}")
    result: dict[int, float] = {}
    for key, amount in pairs:
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        if not _is_token_id(token_id):
            raise ValueError(f"must be {wanted}; {checks.shown(key)} is no token id (integer from 0 to 2147483647)")
        if token_id in result:
            raise ValueError(f"must name each token id once; {token_id} is there twice")
        try:
            result[token_id] = bias(amount)
        except ValueError as error:
            raise ValueError(f"must be {wanted}; that of token {token_id} {error}") from None
    return tuple(sorted(result.items()))


def _allowed_token_ids(value: object) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = checks.token_ids()(value)
    if not token_ids:
        raise ValueError("must name at least one token id, not []: no token could be chosen")
    return token_ids


def _bad_words_ids(value: object) -> tuple[tuple[int, ...], ...]:
    wanted = f"a list of at most {MAX_BAD_WORDS} lists of token ids, at most {MAX_BAD_WORD_IDS} ids in all, none empty"
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, (list, tuple)) for word in value):
        raise ValueError(f"must be {wanted}, not {checks.shown(value)}")
    words = tuple(tuple(word) for word in value)
    for word in words:
        if not word or not all(map(_is_token_id, word)):
            raise ValueError(f"must be {wanted} (integers from 0 to 2147483647); {checks.shown(list(word))} is not")
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_IDS:
        raise ValueError(f"must be {wanted}, not {len(words)} with {sum(map(len, words))} ids")
    return words


def _stop(value: object) -> tuple[str, ...]:
    """A text alone is a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"must be a list of texts, none empty, not {checks.shown(value)}")
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise ValueError(f"must be a list of texts; half of a surrogate pair is no text: {checks.shown(value)}")
    return tuple(texts)


def _logprobs_check() -> checks.Check:
    wanted = f"an integer from 0 (the token alone) to {MAX_LOGPROBS}"
    return checks.optional(checks.integer(0, MAX_LOGPROBS, wanted=wanted), "null, off,")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one row, each within its range.

    temperature: 0 picks the likeliest token. top_k: 0 is off. top_p: 1 is off. min_p: a share of the likeliest token's
    probability, 0 is off. typical_p: 1 is off. logit_bias: pairs of a token id and what is added to its logit.
    allowed_token_ids: no other token is chosen, None is "all". bad_words_ids: sequences of tokens that never appear.
    no_repeat_ngram_size: no sequence of so many tokens appears twice in prompt and output, 0 is off.
    repetition_penalty: over prompt and output, 1 is off. frequency_penalty, presence_penalty: over the output, 0 is
    off. min_tokens: the first so many tokens do not end the row, 0 is off. max_tokens: None is "to the model's limit".
    ignore_eos: EOS ids do not end the row. stop_token_ids: further ids that do. stop: texts that do; include_stop:
    whether the answer keeps the one that did. logprobs, prompt_logprobs: log-probabilities of each token and so many of
    the likeliest, None is off; logprobs_mode: of the model's own logits (raw), or of what the token was drawn from
    (processed). n: samples of the row. seed: None is "none".

    Raises: SamplingError naming the parameter, the value and what is allowed.
    """

    # The bounds of temperature and repetition_penalty keep logit / value finite in float32.
    temperature: float = _param(
        1.0, checks.number(1e-6, 1e6, wanted="0, or a number from 0.000001 to 1000000", zero=True)
    )
    top_k: int = _param(0, checks.integer(0, 2**31 - 1, wanted="an integer from 0 (off) up"))
    top_p: float = _param(1.0, checks.number(1e-30, 1.0, wanted="a number above 0 and up to 1 (off)"))
    min_p: float = _param(0.0, checks.number(0.0, 1.0, wanted="a number from 0 (off) to 1"))
    typical_p: float = _param(1.0, checks.number(1e-30, 1.0, wanted="a number above 0 and up to 1 (off)"))
    logit_bias: tuple[tuple[int, float], ...] = _param((), _logit_bias)
    allowed_token_ids: tuple[int, ...] | None = _param(None, checks.optional(_allowed_token_ids, "null, every token,"))
    bad_words_ids: tuple[tuple[int, ...], ...] = _param((), _bad_words_ids)
    no_repeat_ngram_size: int = _param(0, checks.integer(0, 2**31 - 1, wanted="an integer from 0 (off) up"))
    repetition_penalty: float = _param(
        1.0, checks.number(1e-6, 1e6, wanted="a number from 0.000001 to 1000000 (1 is off)")
    )
    frequency_penalty: float = _param(0.0, _PENALTY)
    presence_penalty: float = _param(0.0, _PENALTY)
    min_tokens: int = _param(0, checks.integer(0, 2**31 - 1, wanted="an integer from 0 (off) up"))
    max_tokens: int | None = _param(
        None,
        checks.optional(checks.integer(1, 2**31 - 1, wanted="an integer from 1 up"), "null, to the model's limit,"),
    )
    ignore_eos: bool = _param(False, checks.boolean())
    stop_token_ids: tuple[int, ...] = _param((), checks.token_ids())
    stop: tuple[str, ...] = _param((), _stop)
    include_stop: bool = _param(False, checks.boolean())
    logprobs: int | None = _param(None, _logprobs_check())
    logprobs_mode: str = _param("raw", checks.choice("raw", "processed"))
    prompt_logprobs: int | None = _param(None, _logprobs_check())
    n: int = _param(1, checks.integer(1, MAX_SAMPLES, wanted=f"an integer from 1 to {MAX_SAMPLES}"))
    seed: int | None = _param(
        None, checks.optional(checks.integer(0, 2**63 - 1, wanted="an integer from 0 to 2^63 - 1"), "null, not given,")
    )

    def __post_init__(self) -> None:
        """Put each value into its proper type, or raise."""
        for name in PARAM_NAMES:
            object.__setattr__(self, name, checked_param(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens must be at most max_tokens = {self.max_tokens}, not {self.min_tokens}")
        self.require_a_choice(())

    def require_a_choice(self, eos_token_ids: Iterable[int]) -> None:
        """Return if a first token can be chosen, in a model with these EOS ids.

        Raises: SamplingError if everything that is allowed is ruled out.
        """
        if self.allowed_token_ids is None:
            return
        takers = {"bad_words_ids": {word[0] for word in self.bad_words_ids if len(word) == 1}}
        if self.min_tokens:
            takers["stop_token_ids"] = set(self.stop_token_ids)
            takers["EOS"] = set() if self.ignore_eos else set(eos_token_ids)
        allowed = set(self.allowed_token_ids)
        if allowed.issubset(set().union(*takers.values())):
            names = " and ".join(name for name, ids in takers.items() if ids & allowed)
            reason = f" (min_tokens is {self.min_tokens})" if self.min_tokens else ""
            raise SamplingError(
                f"allowed_token_ids must name at least one token id that {names} leave to it{reason}, not"
                f" {checks.shown(list(self.allowed_token_ids))}: no token could be chosen"
            )

    def named_token_ids(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each parameter that names tokens, with the ids: all must be in the model's vocabulary."""
        yield "stop_token_ids", self.stop_token_ids
        yield "logit_bias", tuple(token_id for token_id, _ in self.logit_bias)
        yield "allowed_token_ids", self.allowed_token_ids or ()
        yield "bad_words_ids", tuple(token_id for word in self.bad_words_ids for token_id in word)


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
    values = {name: checked_param(name, value, where) for name, value in overrides.items()}
    try:
        return replace(defaults, **values)
    except SamplingError as error:  # two parameters that do not go together
        raise SamplingError(error.message, where=where) from None
