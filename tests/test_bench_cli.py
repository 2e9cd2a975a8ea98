"""`specgen bench` with shapes, random weights and acceptance by lot, through the real engine on a tiny model."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import CONFIG, write_checkpoint

from specgen.cli import bench, bench_setup
from specgen.cli.bench_setup import BenchSetup
from specgen.cli.main import main
from specgen.cli.own_process import in_own_process
from specgen.cli.signals import Interrupts
from specgen.engine import client
from specgen.job.bench_figures import Shape
from specgen.worker import config as worker_config


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config.json alone in its folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def test_random_weights_shapes_and_acceptance_by_lot(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 rows of 100 tokens are about 570 steps at K = 3: shares within 5 standard deviations (0.1) of the rates."""
    args = ["bench", "--config", config, "--random-weights", "--shape", "1x8x12,16x8x100", "-k", "0,3"]
    flags = [
        "--synthetic-acceptance",
        ".85,.7,.55",
        "--rounds",
        "1",
        "--json",
        "-",
        "--trace",
        str(tmp_path / "t.json"),
    ]
    assert main([*args, *flags]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    small, large = figures["cases"]
    assert (small["shape"], large["shape"], large["rows"], large["prompt_tokens"]) == ("1x8x12", "16x8x100", 16, 128)
    plain, drafted = large["sides"]
    assert plain["completion_tokens"] == drafted["completion_tokens"] == 1600
    assert large["equal"] is None
    assert "the tokens mean nothing" in captured.err
    assert drafted["spec"]["acceptance_per_pos"] == pytest.approx([0.85, 0.7, 0.55], abs=0.1)
    assert drafted["steps"] < 0.6 * plain["steps"]
    for side in large["sides"]:
        decode = side["decode"]
        assert decode["rows"] == 16
        assert 2 * decode["ms"] > decode["device_ms"] > 0.5 * decode["target_ms"] > 0
        assert 0 < decode["floor_share"] < 1
        assert 0 < side["run_floor_share"] < 1
    assert figures["ceilings"]["bytes_per_second"] > 0
    assert figures["recipe"]["engine.max_num_seqs"] == 16
    assert figures["recipe"]["engine.max_model_len"] == 108
    assert figures["recipe"]["engine.enable_prefix_caching"] is False
    for k in (0, 3):
        assert json.loads((tmp_path / f"t-16x8x100-k{k}.json").read_text())["traceEvents"]
    assert "no trace, 3 drafts a step, 1x8x12: too few steps of 1 row" in captured.err
    plain_start, drafted_start = figures["engines"]
    assert drafted_start["weight_bytes"] > plain_start["weight_bytes"] > 0, "with K = 0 no head is loaded"
    for start in figures["engines"]:
        assert start["ready_seconds"] >= start["weight_seconds"] > 0
        assert start["first_seconds"] > 0 and start["kv_tokens"] >= 16 * 108
        assert set(start["memory"]) == {"total", "limit", "used", "step_peak", "graphs", "kv", "left"}


def test_a_checkpoint_without_a_tokenizer_gives_the_same_tokens_for_every_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    args = ["bench", "--model", str(folder), "--shape", "3x8x10", "-k", "0,1,2", "--rounds", "2"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "token ids: the same" in out
    assert out.count("3x8x10 ") == 3


def test_skipped_prompts_a_model_without_a_head_and_a_json_file_all_the_time(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 200 prompt tokens, of which none is read: as many steps as tokens, and every step has both rows."""
    seen: list[list[tuple[int, bool]]] = []

    def write(path: str, text: str, what: str) -> None:
        seen.append([(s["num_tokens"], s["headless"]) for s in json.loads(text)["cases"][0]["sides"]])
        Path(path).write_text(text)

    monkeypatch.setattr(bench, "write_file", write)
    path = tmp_path / "f.json"
    args = ["--config", config, "--random-weights", "--shape", "2x200x20", "-k", "none,0,1", "--skip-prompts"]
    assert main(["bench", *args, "--rounds", "1", "--json", str(path)]) == 0
    assert seen[:3] == [[(0, True)], [(0, True), (0, False)], [(0, True), (0, False), (1, False)]]
    figures = json.loads(path.read_text())
    (case,) = figures["cases"]
    assert figures["skips_prompts"] and case["equal"] is None
    for side in case["sides"][:2]:
        assert side["steps"] <= 21
        assert side["decode"]["rows"] == 2 and not side["decoded_alone"]
    headless, plain, _ = figures["engines"]
    assert headless["weight_bytes"] == plain["weight_bytes"]
    out = capsys.readouterr().out
    assert "prompts counted as computed: the tokens mean nothing" in out
    assert "× as fast as the model without a draft head" in out
    assert "0, no head" in out


def test_each_mode_of_exactness_runs_in_a_process_of_its_own(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the CPU stands in for a GPU, which has two kinds of products, and this process for the others."""
    ran: list[str] = []

    def here(function: Any, setup: BenchSetup, *args: Any) -> Any:
        (mode,) = setup.exactness
        ran.append(mode)
        result = pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(setup)), *args)))  # as over a pipe
        return result

    monkeypatch.setattr(bench, "in_own_process", here)
    for module in (worker_config, client):
        monkeypatch.setattr(module, "is_exact", lambda exactness, device: exactness == "exact")
    args = ["--config", config, "--random-weights", "--shape", "2x8x12", "-k", "0,1", "--exactness", "exact,fast"]
    assert main(["bench", *args, "--rounds", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert ran == ["exact", "fast"]
    (case,) = figures["cases"]
    assert [(side["num_tokens"], side["exactness"]) for side in case["sides"]] == [
        *[(0, "exact"), (1, "exact")],
        *[(0, "fast"), (1, "fast")],
    ]
    assert [engine["exactness"] for engine in figures["engines"]] == ["exact", "exact", "fast", "fast"]
    assert captured.err.count("× as fast as fast") == 2
    assert "1, fast" in captured.err


def test_figures_come_back_from_a_process_of_its_own(config: str) -> None:
    flags = bench_setup.BenchFlags(config=Path(config), random_weights=True, num_spec_tokens="1", num_rounds=1)
    shapes = [Shape(2, 4, 6)]
    with Interrupts() as interrupts:
        setup = bench_setup.set_up(flags, {}, shapes, interrupts)
    result = in_own_process(bench._measure, setup, shapes)
    assert [side.num_tokens for side in result.cases[0].sides] == [1]
    assert result.machine.cost_model is not None and result.as_dict()["cases"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--random-weights"], "--random-weights and --config go together"),
        (["--config", "CONFIG"], "--random-weights and --config go together"),
        (["--config", "elsewhere/config.json", "--random-weights"], "elsewhere/config.json: there is no such file"),
        (["--config", "weights.txt", "--random-weights"], "--config names a config.json"),
        (["--config", "CONFIG", "--random-weights", "--model", "x"], "takes the place of --model"),
        (["--shape", "3x4"], "--shape: '3x4' is no shape"),
        (["--shape", "1x8x8", "-k", "a"], "--num-spec-tokens: 'a' is no number of drafts"),
        (["--shape", "1x8x8", "-k", "0,99"], "command line: speculation.num_tokens must be"),
        (["--shape", "1x8x8", "-k", "0,-1"], "command line: speculation.num_tokens must be"),
        (["--shape", "1x8x8", "-k", "none"], "-k none builds the model without its draft layers"),
        (["--shape", "1x8x8", "--exactness", "exact,very"], "command line: engine.exactness must be"),
        (["--shape", "1x8x8", "--exactness", "exact,fast"], "on the CPU there are only exact products"),
        (["--skip-prompts"], "--skip-prompts is for shapes"),
        (
            ["--config", "HEADLESS", "--random-weights", "--shape", "1x8x8", "-k", "0,2"],
            "headless/config.json: 2 drafts a step are asked for, and the model has no draft layers (-k 0 measures",
        ),
        (["--shape", "1x8x8", "--trace", "weights.txt/t.json"], "weights.txt"),
        (["--shape", "1x8x8", "--json", "no/f.json"], "does not exist"),
        (["--shape", "1x8x8", "--synthetic-acceptance", "x"], "--synthetic-acceptance: 'x' are no rates"),
        (["--shape", "1x8x8", "--synthetic-acceptance", ".5", "-k", "2"], "needs 2 rates, one a draft"),
        (["--shape", "1x8x8", "--synthetic-acceptance", ".5,.7", "-k", "2"], "that do not rise"),
        (["--shape", "1x8x8", "--exactness", "very"], "command line: engine.exactness must be"),
        (["--shape", "1x8x8", "--peer"], "no --shape"),
        (
            ["--shape", "1x300x8", "--config", "CONFIG", "--random-weights"],
            "--shape: engine.max_model_len is 308; the model's limit is 256 tokens",
        ),
        (["--shape", "1x8x8", "--trace", "no/t.json"], "does not exist"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    part: str,
) -> None:
    """All of them before anything is measured."""
    monkeypatch.setattr(bench, "_measure_all", lambda *_: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.txt").write_text("")
    (tmp_path / "headless").mkdir()
    (tmp_path / "headless" / "config.json").write_text(json.dumps(CONFIG | {"num_nextn_predict_layers": 0}))
    paths = {"CONFIG": config, "HEADLESS": "headless/config.json"}
    assert main(["bench", *(paths.get(arg, arg) for arg in args)]) == 2
    assert part in " ".join(capsys.readouterr().err.split())


def test_a_run_refuses_acceptance_by_lot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: stories-7m}\ninput: {path: x.jsonl}\noutput: {path: y.jsonl}\n"
        "speculation:\n  method: synthetic\n  acceptance: [0.9, 0.9, 0.9]\n"
    )
    for command in ("run", "check", "verify"):
        assert main([command, str(recipe)]) == 2
        told = capsys.readouterr().err
        assert f"{recipe}:5: speculation.method: synthetic" in told
        assert "specgen bench only" in told


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        # -P: the checkout's own folder `specgen` lacks what the installation puts into it
        [sys.executable, "-P", "-m", "specgen.cli", "--version"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("specgen ")
