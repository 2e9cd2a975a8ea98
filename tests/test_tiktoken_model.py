"""A vocabulary in tiktoken's file: ids as by the rule that it stands for, cut and merged in plain Python."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from specgen.errors import ModelError
from specgen.tiktoken_model import _LETTERS, _PIECES
from specgen.tokenizer import Tokenizer, added_token_ids, eos_token_ids

TEXTS = [
    "The old man's dog didn't bark; THEY'LL see 12345 HTTPServers, won't they?",
    "  def f(x):\n\treturn x+1  # ok\r\n\n\n   next    line \n ",
    "我们在2024年12月去了北京，看到了Café和naïve的人们。Ça va？",
    "Ελληνικά кириллица עברית हिन्दी ไทย 日本語カタカナ한국어 🙂👍🏽 e\u0301 \u200b",
    "a" * 50 + " " * 33 + "abab" * 9 + "\t\t\t" + "1" * 10,
    "",
]
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {},
}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """All bytes and some hundred merges that the texts give."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=_LETTERS, show_progress=False)
    backend.train_from_iterator(TEXTS * 2, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(_LETTERS)}
    order = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[letter] for letter in token): rank for rank, (token, _) in enumerate(order)}


def write(folder: Path, ranks: dict[bytes, int], **changes: object) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    first = len(ranks)
    named = {str(first): {"content": "[BOS]", "special": True}, str(first + 1): {"content": "[EOS]", "special": True}}
    named[str(first + 4)] = {"content": "<|tool|>", "special": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"added_tokens_decoder": named} | changes))
    return folder


def plain_ids(ranks: dict[bytes, int], text: str) -> list[int]:
    """Pieces of the text; in each, the neighbours whose join has the lowest rank are joined first."""
    ids = []
    for piece in regex.findall("(?V1)" + "|".join(_PIECES), text):
        whole = piece.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while joins := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            i = min(joins)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_ids_are_those_of_the_plain_rule(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = Tokenizer(write(tmp_path, ranks))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == plain_ids(ranks, text)
        assert tokenizer.decode(ids) == text
    assert max(len(token) for token in ranks) > 8  # long tokens are put together from short ones


def test_pieces_are_cut_as_they_are_published() -> None:
    pieces = regex.findall("(?V1)" + "|".join(_PIECES), "They'LL go to 北京大学, Ça's 12345\n\n  ok")
    assert pieces == ["They'LL", " go", " to", " ", "北京大学", ",", " Ça's", " ", "123", "45", "\n\n", " ", " ok"]


def test_special_tokens_stand_behind_the_vocabulary(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    folder, first = write(tmp_path, ranks), len(ranks)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": first + 2, "vocab_size": first + 256}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == first + 256
    ids = tokenizer.encode("[BOS]a[EOS]<|tool|>")
    assert ids == [first, ranks[b"a"], first + 1, first + 4]
    assert tokenizer.decode(ids) == "a<|tool|>"  # the one that is not special is text
    assert tokenizer.token_text(first + 9) == f"<|reserved_token_{first + 9}|>"
    assert tokenizer.prefix_ids == [] and tokenizer.bos_token_id == first
    assert eos_token_ids(folder, tokenizer) == (first + 1, first + 2)
    assert added_token_ids(folder) == (first, first + 1, first + 4)


def test_what_is_not_such_a_file_is_named(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_class 'QWenTokenizer' is not supported for a tiktoken\.model"):
        Tokenizer(write(tmp_path, ranks, tokenizer_class="QWenTokenizer"))
    write(tmp_path, ranks)
    for content, part in ((b"YQ== x\n", "cannot be read"), (b"YQ== 0\nYg== 2\n", "count up from 0"), (b"\xff", "read")):
        (tmp_path / "tiktoken.model").write_bytes(content)
        with pytest.raises(ModelError, match=rf"tiktoken\.model: .*{part}"):
            Tokenizer(tmp_path)
