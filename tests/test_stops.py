"""Stop strings over text that grows token by token: across tokens, inside a token, several at once, half characters."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specgen.engine.request import EngineOutput
from specgen.model_path import resolve_model
from specgen.sampling_params import SamplingParams
from specgen.stops import StopStrings, answer_text, stop_check_of
from specgen.tokenizer import Tokenizer

TOKENIZER = Tokenizer(resolve_model("stories-7m"))


def first(token_ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> tuple[int, str, int] | None:
    """After how many tokens, at which string, and where it begins."""
    check = StopStrings(TOKENIZER, stops, min_tokens)
    for n, token_id in enumerate(token_ids, 1):
        found = check.push(token_id)
        if found is not None:
            return n, *found
    return None


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode_batch([text])[0]


def expected(token_ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[int, str, int] | None:
    """By the whole text after each token, half characters left out."""
    before = 0
    for n in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:n])
        whole = text.rstrip("\ufffd")
        ends = [(at + len(s), at, s) for s in stops for at in range(len(whole)) if whole.startswith(s, at)]
        ends = [end for end in ends if end[0] > before]
        if ends and n > min_tokens:
            _, at, stop = min(ends)
            return n, stop, at
        before = len(whole)
    return None


TEXT = 'Once upon a time, there was a little girl. She said: "Grüße, 你好 🙂!" Then the end came, the end.'


@pytest.mark.parametrize("seed", range(40))
def test_any_piece_of_the_text_is_found_where_it_first_ends(seed: int) -> None:
    rng = random.Random(seed)
    token_ids = ids_of(TEXT)
    stops = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(TEXT) - 1)
        stops.append(TEXT[start : start + rng.choice([1, 2, 5, 12])])
    if rng.random() < 0.3:
        stops.append("never there")
    min_tokens = rng.choice([0, 0, 3, 12])
    assert first(token_ids, stops, min_tokens) == expected(token_ids, stops, min_tokens)


def test_the_earliest_end_wins_and_of_those_the_longest() -> None:
    token_ids = ids_of("a little girl.")
    assert first(token_ids, ["girl", "tle", "little"])[1:] == ("little", 2)  # type: ignore[index]
    assert first(token_ids, ["girl.", "gir", "l."])[1] == "gir"  # type: ignore[index]


def test_a_string_within_the_least_length_ends_nothing_later_either() -> None:
    token_ids = ids_of("a little girl.")
    n, *_ = first(token_ids, ["little"])  # type: ignore[misc]
    assert first(token_ids, ["little"], min_tokens=n) is None
    assert first(token_ids, ["little"], min_tokens=n - 1) == (n, "little", 2)


def test_half_a_character_is_never_looked_at() -> None:
    """The replacement character that stands for it is no text of the row."""
    token_ids = ids_of("so 🙂 yes")
    assert first(token_ids, ["\ufffd"]) is None
    found = first(token_ids, ["🙂"])
    assert found is not None and TOKENIZER.decode(token_ids[: found[0]]).endswith("🙂")


@pytest.mark.parametrize(("include", "text"), [(False, "Once upon"), (True, "Once upon a t")])
def test_the_text_is_cut_inside_the_token(include: bool, text: str) -> None:
    params = SamplingParams(stop=" a t", include_stop=include)
    token_ids = ids_of("Once upon a time, there")
    check = stop_check_of(params, TOKENIZER)
    assert check is not None
    found = first(token_ids, params.stop)
    assert found is not None
    n, stop, at = found
    output = EngineOutput(0, [], "stop", stop, stop_at=at)
    assert answer_text(TOKENIZER, token_ids[:n], params, output) == text
    assert TOKENIZER.decode(token_ids[:n]) == "Once upon a time"


def test_without_stop_strings_there_is_no_check() -> None:
    assert stop_check_of(SamplingParams(), TOKENIZER) is None
    ids = ids_of("a little girl.")
    assert answer_text(TOKENIZER, ids, SamplingParams(), EngineOutput(0, [], "length")) == "a little girl."
    assert answer_text(TOKENIZER, ids, SamplingParams(), EngineOutput(0, [], "stop", 5)) == "a little girl"


def test_ids_that_the_stream_refuses_are_decoded_whole() -> None:
    """Whatever the bytes, what is found is where the whole text has it."""
    rng = random.Random(1)
    for _ in range(20):
        token_ids = [rng.randrange(3, 3 + 256) for _ in range(12)] + ids_of(" the end")
        assert first(token_ids, ["the end", "end"]) == expected(token_ids, ["the end", "end"], 0)
