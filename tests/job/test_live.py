"""What is seen while a job runs: a live view, lines or JSON, all from the same figures."""

import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from specgen.cli import live
from specgen.cli.live import Display, JobFigures, Shown
from specgen.cli.main import main
from specgen.cli.render import Console
from specgen.job.job import Progress
from specgen.stats import SpecStats


def progress(rows: int, seconds: float, tokens: int, finished: int) -> Progress:
    spec = SpecStats()
    for _ in range(10):
        spec.observe(3, 1, 2)
    return Progress(rows, rows, 2, tokens, finished, 4, 3, seconds, spec, 0.25, {"bad_json": 2})


@pytest.fixture
def session(workplace: Any) -> Any:
    workplace.write([{"prompt": f"row {i}"} for i in range(10)])
    session = workplace.session("sampling.max_tokens=30")
    yield session
    session.close()


@pytest.fixture
def look(session: Any) -> Callable[..., Callable[[], Shown]]:
    job = JobFigures(session)
    return lambda *at: lambda: job.shown(progress(*at))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(live, "_VIEW_SECONDS", 0.0)


def test_json_lines(look: Any, at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Console(quiet=True), "json") as display:
        display.update(look(0, 1.0, 50, 0))
        display.update(look(4, 2.0, 150, 80))
    first, second, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["event"] == second["event"] == "progress"
    assert last == second | {"event": "end"}
    assert first["eta_seconds"] is None
    assert (second["rows"], second["rows_total"], second["failed"]) == (4, 10, 2)
    assert second["error_codes"] == {"bad_json": 2}
    assert (second["tokens_per_second"], second["tokens_per_second_mean"]) == (100.0, 75.0)
    # six rows of at most 30 tokens, 70 of which are there
    assert second["eta_seconds"] == (6 * 30 - 70) / 100
    assert second["acceptance_per_pos"] == [1.0, 0.0, 0.0]
    assert (second["kv_usage"], second["running"], second["waiting"]) == (0.25, 4, 3)


def test_a_job_goes_on_though_nobody_watches_it(
    look: Any, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in ("json", "lines"):
        for stderr in (open("/dev/full", "w"), None):  # noqa: SIM115
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", stderr)
                with Display(Console(), mode) as display:
                    display.update(look(4, 2.0, 150, 80))
    assert capsys.readouterr().out == ""


def test_lines_and_silence(look: Any, at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("auto", "lines"):
        with Display(Console(), mode) as display:
            display.update(look(4, 2.0, 150, 80))
        told = capsys.readouterr().err
        assert told == (
            "rows done: 4 of 10, 75 tokens/s, 2.00 tokens/step, 4 running, 3 waiting, 0:01 left,"
            " 2 failed (bad_json × 2)\n"
        )
    for console, mode in ((Console(quiet=True), "auto"), (Console(), "none")):
        with Display(console, mode) as display:
            display.update(look(4, 2.0, 150, 80))
        assert capsys.readouterr().err == ""


def test_check_tells_how_far_it_is(
    workplace: Any, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace.write([*[{"prompt": f"row {i}"} for i in range(10)], "broken"])
    recipe = workplace.folder / "job.yaml"
    recipe.write_text("model: {path: stories-7m}\nsampling: {seed: 7}\n")
    args = ["check", str(recipe), str(workplace.input)]
    assert main([*args, "--progress", "lines"]) == 3
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11 + 1
    assert re.fullmatch(r"rows looked at: 4 of 11, [\d,]+ rows/s, \d+ tokens, 0:0\d left", told[3])
    assert told[-1].endswith("0:00 left, 1 failed (bad_json × 1)")
    assert main([*args, "--progress", "json", "-q"]) == 3
    told = capsys.readouterr().err.splitlines()
    assert told.pop(10).startswith("warning: ")
    *_, last, end = map(json.loads, told)
    assert (last["rows"], last["rows_total"], last["failed"], last["eta_seconds"]) == (11, 11, 1, 0.0)
    assert end["event"] == "end"
    assert end["error_codes"] == {"bad_json": 1}
    assert main([*args, "-q"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_terminal_has_a_live_view(look: Any, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    screen = io.StringIO()
    console.rich.file = screen
    console.rich._force_terminal = console.rich.is_interactive = True
    with Display(console, "auto") as display:
        display.update(look(4, 2.0, 150, 80))
    told = screen.getvalue()
    for part in (
        "4 of 10",
        "2 failed (bad_json × 2)",
        "75 now",
        "75 mean, 150 in all",
        "4 running, 3 waiting",
        "KV 25%",
        "2.00 tokens a step",
        "draft 3",
        "100.0%  10 of 10",
        "0:01 left",
    ):
        assert part in told
    shared = io.StringIO()
    console.rich.file = shared
    with Display(console, "auto", shares_terminal=True) as display:
        display.update(look(4, 2.0, 150, 80))
    assert "draft" not in shared.getvalue()
