"""Text to ids and back: BOS once, streams that equal a whole decode, EOS ids from everywhere they are declared."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import ModelError, RowError
from specgen.model_path import resolve_model
from specgen.tokenizer import Tokenizer, added_token_ids, eos_token_ids

FOLDER = resolve_model("stories-7m")
TOKENIZER = Tokenizer(FOLDER)


def copy_with(folder: Path, *, post_processor: bool, **config: object) -> Path:
    """Copy the bundled tokenizer, with or without its post-processor, with another tokenizer_config.json."""
    content = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    if not post_processor:
        content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_bos_comes_once() -> None:
    assert TOKENIZER.bos_token_id == 0
    assert TOKENIZER.encode("Hi")[0] == 0
    assert TOKENIZER.encode("Hi").count(0) == 1
    assert TOKENIZER.encode("<|bos|>Hi") == TOKENIZER.encode("Hi")
    assert TOKENIZER.encode("<|bos|>") == [0]


@pytest.mark.parametrize(
    ("post_processor", "add_bos", "count"),
    [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0), (False, None, 0)],
)
def test_who_decides_about_bos(tmp_path: Path, post_processor: bool, add_bos: bool | None, count: int) -> None:
    config = {"bos_token": {"content": "<|bos|>"}} | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = Tokenizer(copy_with(tmp_path, post_processor=post_processor, **config))
    assert tokenizer.encode("Hi").count(0) == count
    assert tokenizer.encode("Hi")[count:] == TOKENIZER.encode("Hi")[1:]


def test_half_a_surrogate_pair_is_the_rows_error() -> None:
    with pytest.raises(RowError) as caught:
        TOKENIZER.encode("a\ud800b")
    assert caught.value.code == "bad_text"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 260), st.integers(0, 4200)), max_size=40), st.integers(1, 5))
def test_a_stream_gives_what_a_whole_decode_gives(ids: list[int], width: int) -> None:
    stream = TOKENIZER.new_stream()
    pieces = [stream.push(ids[start : start + width]) for start in range(0, len(ids), width)]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == TOKENIZER.decode(ids)
    "".join(pieces).encode("utf-8")


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("." + text)) == "." + text or "<|" in text


def test_a_character_is_never_given_by_halves() -> None:
    stream = TOKENIZER.new_stream()
    ids = TOKENIZER.encode("é🙂")[1:]
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces) == "é🙂"
    assert "\ufffd" not in "".join(pieces)
    cut = TOKENIZER.new_stream()
    cut.push(ids[:-1])
    cut.finish()
    assert cut.text == TOKENIZER.decode(ids[:-1])


def test_special_tokens_are_no_text() -> None:
    hello = TOKENIZER.encode("Hello")
    assert TOKENIZER.decode([*hello, 1, *hello[1:], 2]) == "HelloHello"


def test_eos_is_the_union_of_all_that_is_declared(tmp_path: Path) -> None:
    assert eos_token_ids(FOLDER, TOKENIZER) == (1,)
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|pad|>"}')
    assert eos_token_ids(tmp_path, Tokenizer(tmp_path)) == (2, 3, 5, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert eos_token_ids(tmp_path, Tokenizer(tmp_path)) == ()


def test_an_eos_beyond_the_vocabulary_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 64, -1], "vocab_size": 64}')
    assert eos_token_ids(tmp_path, TOKENIZER) == (7,)
    assert "EOS id 64 of config.json is not in the vocabulary" in caplog.text
    assert "EOS id -1" in caplog.text


@pytest.mark.parametrize("declared", ['"7"', "[7, null]", "7.0", "true", "{}"])
def test_an_eos_that_is_no_id_is_an_error(tmp_path: Path, declared: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {declared}}}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        eos_token_ids(tmp_path, TOKENIZER)


def test_a_clone_without_its_large_files_is_told_so(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        with pytest.raises(ModelError, match=rf"{name} is Git LFS's pointer.*git lfs pull"):
            Tokenizer(tmp_path)


def test_added_tokens_are_listed_beside_the_vocabulary(tmp_path: Path) -> None:
    assert added_token_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<x>"}, {"id": 2}], "model": {}}')
    assert added_token_ids(tmp_path) == (2, 9)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": null}')
    assert added_token_ids(tmp_path) == ()
    assert set(eos_token_ids(FOLDER, Tokenizer(FOLDER))) <= set(added_token_ids(FOLDER))


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer(tmp_path)
