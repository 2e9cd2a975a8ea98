"""The command line in this process, over a scripted engine: exit codes, messages, and what goes to which stream."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgen.cli.main import main
from specgen.engine.client import EngineClient
from specgen.recipe import load_recipe

RECIPE = "model: {path: stories-7m}\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\nsampling: {seed: 7}\n"


@pytest.fixture(autouse=True)
def _plain_logging() -> Iterator[None]:
    """Undo what the command line does to the logging of this process."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.getLogger("specgen").setLevel(logging.NOTSET)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, fake_engine: Any) -> list[Any]:
    """Put scripted engines in the place of loaded ones; returns those that were made."""
    made: list[Any] = []

    def create(recipe: Any, folder: Path, eos_token_ids: Any) -> Any:
        assert (folder / "config.json").is_file()
        assert tuple(eos_token_ids) == (1,)
        made.append(fake_engine())
        return made[-1]

    monkeypatch.setattr(EngineClient, "create", create)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Any]) -> Path:
    """A current directory with job.yaml and ten rows in in.jsonl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(RECIPE)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "prompt": f"row {i}"}) + "\n" for i in range(10)))
    return tmp_path


def test_run_writes_output_recipe_and_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "--stats", "stats.json"]) == 0
    lines = (folder / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(10))
    assert json.loads((folder / "stats.json").read_text())["ok"] == 10
    written = load_recipe(folder / "out.jsonl.recipe.yaml")
    assert written == load_recipe(folder / "job.yaml")
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("10 ok, 0 failed", "stop 10", "tokens a step", "draft 1", "out.jsonl"):
        assert part in captured.err


def test_statistics_may_go_to_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "--stats", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 10


def test_quiet_is_quiet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "--quiet", "--output", "other.jsonl"]) == 0
    assert capsys.readouterr() == ("", "")
    assert (folder / "other.jsonl").is_file()


def test_failed_rows_give_3_and_the_others_their_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(folder / "in.jsonl", "a") as stream:
        stream.write("broken\n")
    assert main(["run", "job.yaml"]) == 3
    assert len((folder / "out.jsonl").read_text().splitlines()) == 11
    assert "bad_json × 1" in capsys.readouterr().err


def test_on_error_stop_gives_3_too(folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"prompt": ""}\n{"prompt": "x"}\n')
    assert main(["run", "job.yaml", "--set", "output.on_error=stop"]) == 3


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["run", "missing.yaml"], "no such recipe file"),
        (["run", "job.yaml", "missing.jsonl"], "missing.jsonl: there is no such input file"),
        (["run", "job.yaml", "--set", "sampling.temprature=1"], "did you mean 'sampling.temperature'?"),
        (["run", "job.yaml", "--set", "sampling.temperature=hot"], "sampling.temperature must be"),
        (["run", "job.yaml", "--set", "model.path=./nowhere"], "no model folder './nowhere'"),
        (["run", "job.yaml", "--set", "model.path=null"], "model.path is missing"),
        (["run", "job.yaml", "--set", "input.path=null"], "input.path is missing"),
        (["run", "job.yaml", "--set", "output.path=null"], "output.path is missing"),
        (["run", "job.yaml", "--output", "in.jsonl", "--overwrite"], "the output is the input file"),
        (["run", "job.yaml", "--output", "no/where.jsonl"], "folder does not exist"),
        (["run", "job.yaml", "--output", "there.jsonl"], "there already"),
        (["run", "job.yaml", "empty.jsonl"], "the input has no rows"),
        (["run", "job.yaml", "--stats", "in.jsonl"], "would overwrite a file of this job"),
        (["run", "job.yaml", "--stats", "no/stats.json"], "cannot be made there"),
        (["run", "job.yaml", "--stats", "-", "--output", "-"], "cannot both go to stdout"),
        (["check", "job.yaml", "--set", "engine.max_model_len=9999"], "the model's limit is 2048"),
        (["check", "job.yaml", "empty.jsonl"], "the input has no rows"),
        (["bench", "--num-spec-tokens", "0"], "must be at least 1"),
        (["bench", "--num-spec-tokens", "99"], "speculation.num_tokens must be"),
        (["bench", "--json", "no/where.json"], "does not exist"),
        (["run"], "Missing argument"),
        (["fly"], "No such command"),
    ],
)
def test_what_the_user_can_mend_gives_2_and_touches_nothing(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str], args: list[str], part: str
) -> None:
    (folder / "there.jsonl").write_text("precious")
    (folder / "empty.jsonl").write_text("\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(args) == 2
    assert part in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert engines == []


def test_overwrite_moves_the_old_output_aside(folder: Path) -> None:
    assert main(["run", "job.yaml", "-q"]) == 0
    old = (folder / "out.jsonl").read_bytes()
    assert main(["run", "job.yaml", "-q"]) == 2
    assert main(["run", "job.yaml", "-q", "--overwrite", "--set", "input.limit=2"]) == 0
    assert (folder / "out.jsonl.old").read_bytes() == old
    assert (folder / "out.jsonl.recipe.yaml.old").is_file()
    assert len((folder / "out.jsonl").read_text().splitlines()) == 2


def test_a_dead_engine_and_a_bug_give_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EngineClient, "create", lambda *args: fake_engine(die_after=3))
    assert main(["run", "job.yaml"]) == 1
    assert "error: the engine stopped: scripted" in capsys.readouterr().err

    def broken(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(EngineClient, "create", broken)
    assert main(["run", "job.yaml", "--overwrite"]) == 1
    told = capsys.readouterr().err
    assert "internal error, ZeroDivisionError: oops" in told
    assert "Traceback" not in told
    assert main(["--debug", "run", "job.yaml", "--overwrite"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_130_and_whole_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: Any, number: int
) -> None:
    engine = fake_engine(max_running=2)
    engine.on_step = lambda step: os.kill(os.getpid(), number) if step == 8 else None
    monkeypatch.setattr(EngineClient, "create", lambda *args: engine)
    handler = signal.getsignal(number)
    assert main(["run", "job.yaml", "--stats", "stats.json"]) == 130
    assert signal.getsignal(number) == handler
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert 0 < len(records) < 10
    assert json.loads((folder / "stats.json").read_text())["interrupted"] is True


def test_a_signal_while_loading_gives_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(EngineClient, "create", create)
    assert main(["run", "job.yaml"]) == 130
    assert not (folder / "out.jsonl").exists()


def test_check_prints_a_recipe_with_origins_and_looks_at_the_rows(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "job.yaml", "--set", "sampling.top_k=4"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["sampling"]["top_k"] == 4
    assert "# --set" in out
    assert "# job.yaml:4" in out
    assert "10 rows can run, 0 cannot" in out
    with open(folder / "in.jsonl", "a") as stream:
        stream.write('broken\n{"id": 3, "prompt": "x"}\n')
    assert main(["check", "job.yaml"]) == 3
    captured = capsys.readouterr()
    assert "10 rows can run, 2 cannot" in captured.out
    assert "in.jsonl:11: the line is not JSON" in captured.err
    assert "line 12 was given before, in line 4" in captured.err
    assert engines == []


def test_bench_prints_a_table_or_json(engines: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "-k", "2", "--rows", "3", "--rounds", "1", "--max-tokens", "5"]
    assert main(args) == 0
    assert "speed-up" in capsys.readouterr().out
    assert main([*args, "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["rows"], figures["speculative"]["num_tokens"], figures["equal"]) == (3, 2, True)
    assert "speed-up" in captured.err
    assert engines[0].requests[-1].params.max_tokens == 5
    assert engines[0].requests[-1].params.temperature == 0.0
    assert engines[0].requests[-1].params.ignore_eos
