"""`tiktoken.model`, the vocabulary that Moonlight and Kimi-K2 publish in place of a tokenizer.json, for `tokenizers`.

The file holds bytes and their rank, which is their id. How a text is cut before, and which ids behind them are special
tokens, is code in those repositories, none of which is run: it is written down here.
"""

import base64
import re
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from specgen import checks
from specgen.errors import ModelError

FILE = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
_NUM_SPECIAL = 256  # ids behind the vocabulary, named or reserved
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Runs of Chinese; words, with a character before and an English ending behind; up to three digits; signs; spaces.
_PIECES = (
    r"[\p{Han}]+",
    f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_BEHIND}",
    f"{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_BEHIND}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def read_tiktoken(path: Path, config: dict[str, object]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tiktoken.model`; `config` is the folder's tokenizer_config.json.

    Raises: ModelError if the file is damaged, or belongs to a tokenizer of another kind.
    """
    kind = config.get("tokenizer_class")
    if kind != _CLASS:
        raise ModelError(
            f"tokenizer_class {checks.shown(kind)} is not supported for a {FILE}",
            where=str(path.parent / "tokenizer_config.json"),
            hint=f"supported: {_CLASS}, of Moonlight and Kimi-K2; others need a tokenizer.json",
        )
    ranks = _read_ranks(path)
    spelled = {token: "".join(_LETTERS[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[token[:i]], spelled[token[i:]])
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex("|".join(_PIECES)), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(config, len(ranks)))
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens in the order of their ranks, which count from 0."""
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), hint="fetch the file again") from error
    if list(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ModelError("its ranks do not count up from 0", where=str(path), hint="fetch the file again")
    return ranks


def _added_tokens(config: dict[str, object], first: int) -> list[AddedToken]:
    """The special tokens, in the order of their ids from `first` on: those that the configuration names, and others."""
    declared = config.get("added_tokens_decoder")
    named = declared if isinstance(declared, dict) else {}
    tokens = []
    for token_id in range(first, first + _NUM_SPECIAL):
        entry = named.get(str(token_id))
        entry = entry if isinstance(entry, dict) else {}
        content = entry.get("content") or f"<|reserved_token_{token_id}|>"
        tokens.append(AddedToken(str(content), normalized=False, special=bool(entry.get("special", True))))
    return tokens


def _letters() -> list[str]:
    """The letter that stands for each byte in `tokenizers`: its own, or one from 256 on if it cannot be seen."""
    letters, more = [], 256
    for byte in range(256):
        if re.fullmatch(r"[!-~¡-¬®-ÿ]", chr(byte)):
            letters.append(chr(byte))
        else:
            letters.append(chr(more))
            more += 1
    return letters


_LETTERS = _letters()
