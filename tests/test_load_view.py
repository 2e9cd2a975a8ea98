"""What a person is told while a large model is loaded."""

import pytest

from specgen.cli import load_view
from specgen.cli.load_view import LoadView
from specgen.cli.render import Console


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, that the view's clock shows."""
    seconds = [0.0]
    monkeypatch.setattr(load_view.time, "perf_counter", lambda: seconds[0])
    return seconds


def test_a_slow_load_is_told_every_two_seconds_and_at_its_end(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    view = LoadView(Console())
    for done in range(1, 11):
        now[0] += 0.5
        view.weights(done * 10**9, 10 * 10**9)
    assert capsys.readouterr().err.splitlines() == [
        "weights: 4.0 of 10.0 GB, 2.0 GB/s",
        "weights: 8.0 of 10.0 GB, 2.0 GB/s",
        "weights: 10.0 of 10.0 GB, 2.0 GB/s",
    ]


def test_a_quick_load_is_not_worth_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    view = LoadView(Console())
    view.weights(5, 10)
    view.weights(10, 10)
    view.kernels(0, 1)
    view.kernels(1, 1)
    assert capsys.readouterr().err == ""


def test_kernels_that_take_long_are_told_apart_from_the_weights(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Now and then all that are known are compiled, and more become known."""
    view = LoadView(Console())
    now[0] = 9.0
    view.kernels(0, 1)
    for done in range(1, 6):
        for compiled in (done - 1, done):
            now[0] += 0.5
            view.kernels(compiled, done)
    assert capsys.readouterr().err.splitlines() == [
        "kernels: 2 of 2 compiled, 2 s",
        "kernels: 4 of 4 compiled, 4 s",
    ]
