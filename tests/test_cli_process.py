"""The command as a process, with the bundled model: pipes, signals and the real engine behind it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
PROMPTS = (ROOT / "recipes" / "prompts" / "stories.jsonl").read_bytes().splitlines(keepends=True)
SPECGEN = [sys.executable, "-P", "-c", "import sys; from specgen.cli.main import main; sys.exit(main())"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_run_on_the_bundled_model(tmp_path: Path) -> None:
    command = [*SPECGEN, "run", QUICKSTART, "--set", "input.limit=3", "--set", "sampling.max_tokens=8"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    records = [json.loads(line) for line in (tmp_path / "quickstart.jsonl").read_bytes().splitlines()]
    assert [record["id"] for record in records] == ["story-000", "story-001", "story-002"]
    for record in records:
        assert record["finish_reason"] == "length"
        assert record["usage"]["completion_tokens"] == 8
        assert record["text"]
    assert (tmp_path / "quickstart.jsonl.recipe.yaml").is_file()
    assert done.stdout == b""


def test_stdin_to_stdout_is_data_only(tmp_path: Path) -> None:
    command = [*SPECGEN, "run", QUICKSTART, "-", "--set", "sampling.max_tokens=4"]
    done = subprocess.run(command, input=b"".join(PROMPTS[:2]) + b"{\n", capture_output=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr.decode()
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["finish_reason"] for record in records] == ["length", "length", "error"]
    assert list(tmp_path.iterdir()) == []


def test_rows_are_answered_while_the_pipe_stays_open_and_a_signal_ends_it() -> None:
    command = [*SPECGEN, "run", QUICKSTART, "-", "--quiet", "--set", "sampling.max_tokens=4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(PROMPTS[0])
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "story-000"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
        assert time.monotonic() - started < 10


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [*SPECGEN, "run", QUICKSTART, "-", "--quiet", "--set", "sampling.max_tokens=4"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            command, input=PROMPTS[0], stdout=write_end, stderr=subprocess.PIPE, timeout=120, check=False
        )
    finally:
        os.close(write_end)
    assert done.returncode == 130, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
