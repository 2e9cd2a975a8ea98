"""A function in a process of its own: its result, its errors, and its end."""

import os

import pytest

from specgen.cli.bench_setup import _rates
from specgen.cli.own_process import in_own_process
from specgen.errors import EngineError, RecipeError


def test_the_result_comes_back() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(sorted, [3, 1, 2]) == [1, 2, 3]


def test_a_users_mistake_is_the_same_error_here() -> None:
    with pytest.raises(RecipeError) as caught:
        in_own_process(_rates, "x")
    assert (caught.value.where, caught.value.hint) == ("--synthetic-acceptance", "like .85,.7,.55, one a draft")


def test_another_error_and_a_death_are_told() -> None:
    with pytest.raises(EngineError, match=r"in the process that measured:\n(?s:.*)ValueError: invalid literal"):
        in_own_process(int, "x")
    with pytest.raises(EngineError, match="ended with exit code 7"):
        in_own_process(os._exit, 7)
