"""Row seeds: stable, in range, and different where rows differ."""

from hypothesis import given
from hypothesis import strategies as st

from specgen import seeds


def test_seeds_are_stable_over_versions() -> None:
    # Written down once: a change here changes the text of every job that anybody repeats.
    assert seeds.row_seed(7, seeds.row_key_of_id("r7")) == 258810077176782766
    assert seeds.own_seed(7, seeds.content_hash("Once upon a time")) == 6721651535454630963
    assert seeds.content_hash("Once upon a time") == "80cfd88540cc86961a4afd9d15d54ddb"


@given(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 1000))
def test_every_seed_fits_a_signed_64_bit_tensor(run_seed: int, key: str, sample: int) -> None:
    assert 0 <= seeds.row_seed(run_seed, key, sample) < 2**63
    assert 0 <= seeds.own_seed(run_seed, key, sample) < 2**63


def test_each_part_of_the_key_matters() -> None:
    base = seeds.row_seed(1, "a", 0)
    others = [
        seeds.row_seed(2, "a", 0),
        seeds.row_seed(1, "b", 0),
        seeds.row_seed(1, "a", 1),
        seeds.own_seed(1, "a", 0),
    ]
    assert len({base, *others}) == 5


def test_row_keys_do_not_meet() -> None:
    digest = seeds.content_hash("x")
    keys = [
        seeds.row_key_of_id(7),
        seeds.row_key_of_id("7"),
        seeds.row_key_of_content(digest, 0),
        seeds.row_key_of_content(digest, 1),
        seeds.row_key_of_id(f"content:{digest}:0"),
    ]
    assert len(set(keys)) == len(keys)


def test_content_hash_tells_text_from_ids_and_lists_apart() -> None:
    prompts: list[str | list[int]] = ["1,2", [1, 2], [12], [1, 2, 0], "", "\ud800"]
    assert len({seeds.content_hash(prompt) for prompt in prompts}) == len(prompts)


def test_drawn_seeds_differ() -> None:
    assert len({seeds.draw_seed() for _ in range(20)}) == 20
