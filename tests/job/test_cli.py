"""The command line in this process, over a scripted engine: exit codes, messages, and what goes to which stream."""

import json
import logging
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgen.cli.main import main
from specgen.engine.client import EngineClient
from specgen.model_path import resolve_model
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

    def create(recipe: Any, folder: Path, eos_token_ids: Any, **_: Any) -> Any:
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
        (["run", "job.yaml", "--output", "in.jsonl", "--fresh"], "the output is the input file"),
        (["run", "job.yaml", "--output", "no/where.jsonl"], "folder does not exist"),
        (["run", "job.yaml", "--output", "there.jsonl"], "there already, and no manifest"),
        (["run", "job.yaml", "twice.jsonl"], "id 'a' of line 3 was given before, in line 1"),
        (["run", "job.yaml", "--shard", "3/2"], "not of the form i/n"),
        (["run", "job.yaml", "nowhere*.jsonl"], "nowhere*.jsonl: there is no such input file"),
        (["merge", "there.jsonl"], "there.jsonl: it is there already"),
        (["merge", "new.jsonl"], "no parts of it"),
        (["run", "job.yaml", "--set", "input.messages=chat"], "the model has no chat template"),
        (["run", "job.yaml", "--set", "input.template='{{ x'"], "input.template is no template"),
        (["run", "job.yaml", "empty.jsonl"], "the input has no rows"),
        (["run", "job.yaml", "--stats", "in.jsonl"], "would overwrite a file of this job"),
        (["run", "job.yaml", "--stats", "no/stats.json"], "folder does not exist"),
        (["run", "job.yaml", "--stats", "-", "--output", "-"], "cannot both go to stdout"),
        (["run", "job.yaml", "--output", "/proc/a.jsonl"], "/proc/a.jsonl: the output cannot be made"),
        (["run", "job.yaml", "--output", "x" * 300], "cannot be made: File name too long"),
        (["run", "job.yaml", "--output", "x" * 250], "the recipe that is written beside the output cannot be made"),
        (["run", "job.yaml", "--output", "job.yaml", "--fresh"], "is the recipe that is being run"),
        (["run", "kept.recipe.yaml", "--output", "kept", "--fresh"], "is the recipe that is being run"),
        (["run", "job.yaml", "--stats", "/proc/a.json"], "/proc/a.json: the statistics file cannot be made"),
        (["run", "job.yaml", "--stats", "out.jsonl"], "would overwrite a file of this job"),
        (["run", "job.yaml", "--stats", "out.jsonl.recipe.yaml"], "would overwrite a file of this job"),
        (["run", "job.yaml", "gzipped"], "gzipped: this is a gzip file"),
        (["check", "job.yaml", "--set", "engine.max_model_len=9999"], "the model's limit is 2048"),
        (["check", "job.yaml", "empty.jsonl"], "the input has no rows"),
        (["check", "job.yaml", "--set", "output.path=in.jsonl"], "the output is the input file"),
        (["check", "job.yaml", "--set", "output.path=no/where.jsonl"], "folder does not exist"),
        (["check", "job.yaml", "--set", "speculation.model=nowhere"], "no model folder 'nowhere'"),
        (["check", "job.yaml", "--set", "speculation.model=smollm2-135m-mtp"], "the draft head does not fit the model"),
        *(
            ([command, "job.yaml", "--set", setting], part)
            for command in ("run", "check")
            for setting, part in (
                ("sampling.logit_bias={4096: 1}", "--set: sampling.logit_bias: token id 4096 is not in"),
                ("sampling.stop_token_ids=[7, 5000]", "--set: sampling.stop_token_ids: token id 5000 is not in"),
                ("input.system=Be brief.", "--set: input.system has no effect: the rows are no chats"),
                ("input.chat_template=job.yaml", "--set: input.chat_template has no effect"),
                ("input.template_args={a: 1}", "--set: input.template_args has no effect"),
                ("input.split=test", "input.split has no effect: it is for datasets"),
                ("input.streaming=true", "--set input.streaming=false"),
            )
        ),
        (["bench", "--num-spec-tokens", "0"], "must be at least 1"),
        (["bench", "-k", "99"], "command line: speculation.num_tokens must be"),
        (["bench", "-k", "99", "--recipe", "job.yaml"], "command line: speculation.num_tokens must be"),
        (["bench", "--json", "no/where.json"], "does not exist"),
        (["bench", "--json", "/proc/a.json"], "/proc/a.json: the JSON file cannot be made"),
        (["bench", "--recipe", "job.yaml", "--json", "in.jsonl"], "would overwrite a file of this job"),
        (["run"], "Missing argument"),
        (["fly"], "No such command"),
    ],
)
def test_what_the_user_can_mend_gives_2_and_touches_nothing(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str], args: list[str], part: str
) -> None:
    (folder / "there.jsonl").write_text("precious")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "twice.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n')
    (folder / "kept.recipe.yaml").write_text(RECIPE)
    (folder / "gzipped").write_bytes(b"\x1f\x8b\x08 ...")
    (folder / "dangling.jsonl").symlink_to(folder / "nowhere")
    before = _contents(folder)
    assert main(args) == 2
    assert part in capsys.readouterr().err
    assert _contents(folder) == before
    assert engines == []


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.exists() else None for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("stream", "args", "part"),
    [
        ("stdout", ["run", "job.yaml", "--output", "-"], "to stdout, which is closed"),
        ("stdout", ["run", "job.yaml", "--stats", "-"], "to stdout, which is closed"),
        ("stdout", ["bench", "--json", "-"], "to stdout, which is closed"),
        ("stdout", ["check", "job.yaml"], "stdout is closed"),
        ("stdin", ["run", "job.yaml", "-", "--output", "new.jsonl"], "from stdin, which is closed"),
    ],
)
def test_a_closed_stream_is_named(
    folder: Path,
    engines: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: str,
    args: list[str],
    part: str,
) -> None:
    monkeypatch.setattr(f"sys.{stream}", None)
    assert main(args) == 2
    assert part in capsys.readouterr().err
    assert engines == []
    assert not (folder / "new.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_figures_that_cannot_be_written_are_still_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "--stats", "/dev/full"]) == 2
    told = capsys.readouterr().err
    assert "10 ok, 0 failed" in told
    assert "/dev/full: the statistics file cannot be written: No space left" in told
    assert len((folder / "out.jsonl").read_text().splitlines()) == 10
    assert main(["bench", "--rows", "1", "--rounds", "1", "--json", "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert "speed-up" in captured.out
    assert "/dev/full: the JSON file cannot be written" in captured.err


def test_flags_lie_over_sets_with_and_without_a_recipe(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-k", "2", "--max-tokens", "5", "--rows", "2", "--rounds", "1", "--json", "-"]
    sets = ["--set", "speculation.num_tokens=4", "--set", "sampling.max_tokens=9", "--set", "sampling.top_k=6"]
    for recipe in ([], ["--recipe", "job.yaml"]):
        assert main(["bench", *recipe, *flags, *sets]) == 0
        used = json.loads(capsys.readouterr().out)["recipe"]
        assert (used["speculation.num_tokens"], used["sampling.max_tokens"], used["sampling.top_k"]) == (2, 5, 6)
    assert main(["bench", "--recipe", "job.yaml", "--set", "input.limit=1", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["rows"] == 1


def test_paths_are_shown_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "[red]").mkdir()
    assert main(["run", "job.yaml", "--output", "[red]/:smile:[x].jsonl", "--set", "input.limit=1"]) == 0
    told = capsys.readouterr().err
    assert "[red]/:smile:[x].jsonl" in told
    assert "1 (1 ok, 0 failed)" in told


def test_run_and_check_say_the_same_of_an_input_without_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty.jsonl").write_text("\n\n")
    told = []
    for command in ("run", "check"):
        assert main([command, "job.yaml", "empty.jsonl"]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] == "error: empty.jsonl: the input has no rows\n"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": "x"}, "hidden_size must be an integer from 1 up, not 'x'"),
        ({"quantization_config": "fp8"}, "quantised weights ('fp8') are not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "unknown type 'longrope'"),
    ],
)
def test_a_wrong_config_is_the_models(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], part: str
) -> None:
    bundled = resolve_model("stories-7m")
    (folder / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((bundled / name).read_bytes())
    config = json.loads((bundled / "config.json").read_text()) | change
    (folder / "model" / "config.json").write_text(json.dumps(config))
    assert main(["check", "job.yaml", "--set", "model.path=model"]) == 2
    told = capsys.readouterr().err
    assert "model/config.json: " in told
    assert part in told


def test_check_finds_a_models_missing_files_and_draft_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundled = resolve_model("stories-7m")
    shutil.copytree(bundled, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["check", "job.yaml", "--set", "model.path=model"]) == 2
    assert "model: no *.safetensors file" in capsys.readouterr().err
    (folder / "model" / "model.safetensors").symlink_to(bundled / "model.safetensors")
    assert main(["check", "job.yaml", "--set", "model.path=model"]) == 0
    config = json.loads((bundled / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    assert main(["check", "job.yaml", "--set", "model.path=model"]) == 2
    assert "the model has no draft layer" in capsys.readouterr().err


def test_fresh_moves_the_old_output_aside(folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "-q"]) == 0
    old = (folder / "out.jsonl").read_bytes()
    assert main(["run", "job.yaml"]) == 0
    assert "nothing is left to do" in capsys.readouterr().err
    assert len(engines) == 1
    assert main(["run", "job.yaml", "--fresh", "--set", "input.limit=2"]) == 0
    assert "the old answers are in out.jsonl.old\n" in capsys.readouterr().err
    assert (folder / "out.jsonl.old").read_bytes() == old
    assert (folder / "out.jsonl.recipe.yaml.old").is_file()
    assert len((folder / "out.jsonl").read_text().splitlines()) == 2


def test_a_dead_engine_and_a_bug_give_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EngineClient, "create", lambda *args, **_: fake_engine(die_after=3))
    assert main(["run", "job.yaml"]) == 1
    told = capsys.readouterr().err
    assert (
        "warning: the engine stopped: what had finished was written (1 answer); the same command goes on from there"
        in told
    )
    assert told.endswith("error: the engine stopped: scripted\n")

    def broken(*args: object, **_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(EngineClient, "create", broken)
    assert main(["run", "job.yaml", "--fresh"]) == 1
    told = capsys.readouterr().err
    assert "internal error, ZeroDivisionError: oops" in told
    assert "Traceback" not in told
    assert main(["--debug", "run", "job.yaml", "--fresh"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_its_code_and_whole_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: Any, number: int, code: int
) -> None:
    engine = fake_engine(max_running=2)
    engine.on_step = lambda step: os.kill(os.getpid(), number) if step == 8 else None
    monkeypatch.setattr(EngineClient, "create", lambda *args, **_: engine)
    handler = signal.getsignal(number)
    assert main(["run", "job.yaml", "--stats", "stats.json"]) == code
    assert signal.getsignal(number) == handler
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert 0 < len(records) < 10
    assert json.loads((folder / "stats.json").read_text())["interrupted"] is True


def test_what_is_logged_looks_like_every_other_warning(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "job.yaml", "-q"]) == 0
    output = folder / "out.jsonl"
    output.write_bytes(output.read_bytes()[:-5])
    capsys.readouterr()
    assert main(["run", "job.yaml", "-q"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning: out.jsonl: the last line was torn: its ")
    logging.getLogger("datasets.load").warning("[old] %s", "format")
    logging.getLogger("specgen.worker").debug("not shown")
    assert capsys.readouterr().err == "warning: datasets.load: [old] format\n"


def test_answers_that_are_to_be_finished_after_a_signal_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for on_interrupt in ("finish", "drop"):
        engine = fake_engine(max_running=2)
        engine.on_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 4 else None
        monkeypatch.setattr(EngineClient, "create", lambda *args, engine=engine, **_: engine)
        sets = ["--set", f"output.on_interrupt={on_interrupt}", "--set", "engine.max_num_seqs=2"]
        assert main(["run", "job.yaml", "-q", "--fresh", *sets]) == 130
        told = capsys.readouterr().err
        is_told = "stopping: what is begun is finished first; a second signal ends the run at once" in told
        assert is_told == (on_interrupt == "finish")
        assert "interrupted: " in told


def test_an_interruption_of_the_imports_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    for command in ("run", "check"):
        monkeypatch.setitem(sys.modules, f"specgen.cli.{command}", Slow(command))
        assert main([command, "job.yaml"]) == 130
        assert capsys.readouterr().err == "interrupted\n"


def test_a_signal_while_loading_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create(*args: object, **_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(EngineClient, "create", create)
    assert main(["run", "job.yaml"]) == 143
    assert not (folder / "out.jsonl").exists()
    assert capsys.readouterr().err.endswith("warning: interrupted before the first row: no answer was added\n")
    assert main(["bench", "--json", "figures.json"]) == 130
    assert not (folder / "figures.json").exists()
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_check_prints_a_recipe_with_origins_and_looks_at_the_rows(
    folder: Path, engines: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "job.yaml", "--set", "sampling.top_k=4"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["sampling"]["top_k"] == 4
    assert "# --set" in out
    assert "# job.yaml:4" in out
    assert "10 rows can run, 0 cannot" in out
    assert "prompt tokens: " in out
    assert "MiB in bfloat16, " in out[out.index("# KV: at most") :]
    assert main(["check", "job.yaml", "--set", "model.kv_dtype=float8"]) == 0
    assert capsys.readouterr().out.endswith("MiB in float8\n")
    with open(folder / "in.jsonl", "a") as stream:
        stream.write("broken\n")
    assert main(["check", "job.yaml"]) == 3
    captured = capsys.readouterr()
    assert "10 rows can run, 1 cannot" in captured.out
    assert "#   bad_json: 1" in captured.out
    assert "in.jsonl:11: the line is not JSON" in captured.err
    with open(folder / "in.jsonl", "a") as stream:
        stream.write('{"id": 3, "prompt": "x"}\n')
    assert main(["check", "job.yaml"]) == 2
    captured = capsys.readouterr()
    assert "10 rows can run, 2 cannot" in captured.out
    assert "in.jsonl: id 3 of line 12 was given before, in line 4 (input.duplicate_ids=keep" in captured.err
    assert engines == []


def test_bench_prints_a_table_or_json(engines: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "-k", "2", "--rows", "3", "--rounds", "1", "--max-tokens", "5"]
    assert main(args) == 0
    assert "speed-up" in capsys.readouterr().out
    assert main([*args, "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    (case,) = figures["cases"]
    assert (case["rows"], [side["num_tokens"] for side in case["sides"]], case["equal"]) == (3, [0, 2], True)
    assert "speed-up" in captured.err
    assert engines[0].requests[-1].params.max_tokens == 5
    assert engines[0].requests[-1].params.temperature == 0.0
    assert engines[0].requests[-1].params.ignore_eos
