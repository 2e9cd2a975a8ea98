"""`specgen bench` with shapes, random weights and acceptance by lot, through the real engine on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import CONFIG, write_checkpoint

from specgen.cli.main import main


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
        assert 2 * decode["ms"] > decode["device_ms"] > decode["target_ms"] > 0
        assert decode["device_ms"] == pytest.approx(
            sum(decode[f"{p}_ms"] for p in ("target", "sampling", "draft")), abs=0.01
        )
        assert 0 < decode["floor_share"] < 1
        assert 0 < side["run_floor_share"] < 1
    assert figures["ceilings"]["bytes_per_second"] > 0
    assert figures["recipe"]["engine.max_num_seqs"] == 16
    assert figures["recipe"]["engine.max_model_len"] == 108
    assert figures["recipe"]["engine.enable_prefix_caching"] is False
    for k in (0, 3):
        assert json.loads((tmp_path / f"t-16x8x100-k{k}.json").read_text())["traceEvents"]
    assert "no trace: too few steps of 1 row" in captured.err


def test_a_checkpoint_without_a_tokenizer_gives_the_same_tokens_for_every_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    args = ["bench", "--model", str(folder), "--shape", "3x8x10", "-k", "0,1,2", "--rounds", "2"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "token ids: the same" in out
    assert out.count("3x8x10 ") == 3


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
        (["--shape", "1x8x8", "--synthetic-acceptance", "x"], "--synthetic-acceptance: 'x' are no rates"),
        (["--shape", "1x8x8", "--synthetic-acceptance", ".5", "-k", "2"], "needs 2 rates, one a draft"),
        (["--shape", "1x8x8", "--synthetic-acceptance", ".5,.7", "-k", "2"], "that do not rise"),
        (["--shape", "1x8x8", "--exactness", "very"], "command line: engine.exactness must be"),
        (["--shape", "1x8x8", "--peer"], "no --shape"),
        (["--shape", "1x300x8", "--config", "CONFIG", "--random-weights"], "the model's limit is 256 tokens"),
        (["--shape", "1x8x8", "--trace", "no/t.json"], "does not exist"),
    ],
)
def test_mistakes_are_named(config: str, capsys: pytest.CaptureFixture[str], args: list[str], part: str) -> None:
    assert main(["bench", *(config if arg == "CONFIG" else arg for arg in args)]) == 2
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
