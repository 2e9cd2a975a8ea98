"""The command as a process, with the bundled model: pipes, signals and the real engine behind it."""

import json
import os
import shlex
import shutil
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


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_answers_go_through_jq_and_back() -> None:
    """Each answer is put behind its prompt, and that continued: a pipe of three processes."""
    command = shlex.join([*SPECGEN, "run", QUICKSTART, "-", "--quiet", "--set", "sampling.max_tokens=4"])
    chain = "{id: .id, prompt: (.input.prompt + .text), first: .text, sampling: {max_tokens: 6}}"
    pipe = f"set -o pipefail; {command} | tee first.jsonl | jq -c {shlex.quote(chain)} | {command} | jq -s ."
    prompts = b'{"id": "\xc3\xa4", "prompt": "Eine M\xc3\xa4r \xf0\x9f\xa6\x8a"}\n' + b"".join(PROMPTS[:2])
    done = subprocess.run(["bash", "-c", pipe], input=prompts, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    firsts = [json.loads(line) for line in Path("first.jsonl").read_bytes().splitlines()]
    seconds = json.loads(done.stdout)
    assert (
        [record["id"] for record in firsts] == [record["id"] for record in seconds] == ["ä", "story-000", "story-001"]
    )
    for first, second in zip(firsts, seconds, strict=True):
        assert second["input"]["prompt"] == first["input"]["prompt"] + first["text"]
        assert second["usage"]["completion_tokens"] == 6


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
        assert process.wait(timeout=60) == 143
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "command", [["bench", "--help"], ["run", "--help"], ["check", QUICKSTART]], ids=["bench", "run", "check"]
)
def test_a_terminal_that_knows_only_ascii_is_shown_escapes(command: list[str]) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run([*SPECGEN, *command], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    assert b"error" not in done.stderr


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


@pytest.mark.parametrize("command", [["run", QUICKSTART], ["bench", "--json", "figures.json"]], ids=["run", "bench"])
def test_a_signal_while_the_model_loads_ends_cleanly(tmp_path: Path, command: list[str]) -> None:
    with subprocess.Popen([*SPECGEN, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told.decode()
    assert b"interrupted" in told.splitlines()[-1]
    assert b"Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_looking_at_the_first_lines_only_is_no_error() -> None:
    check = " ".join([*map(shlex.quote, [*SPECGEN, "check", QUICKSTART])])
    done = subprocess.run(
        ["bash", "-c", f"{check} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"model:\n", b"")


@pytest.mark.parametrize(
    ("redirection", "part"),
    [("--output - >&-", b"to stdout, which is closed"), ("- --output new.jsonl <&-", b"from stdin, which is closed")],
)
def test_closed_streams_are_the_users_to_mend(tmp_path: Path, redirection: str, part: bytes) -> None:
    run = " ".join(map(shlex.quote, [*SPECGEN, "run", QUICKSTART]))
    done = subprocess.run(["bash", "-c", f"{run} {redirection}"], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2, done.stderr.decode()
    assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "redirection", ["rows.jsonl --output - >>rows.jsonl", "- --output rows.jsonl --fresh <rows.jsonl"]
)
def test_a_stream_that_is_redirected_is_known_as_the_file_that_it_is(tmp_path: Path, redirection: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(PROMPTS))
    run = " ".join(map(shlex.quote, [*SPECGEN, "run", QUICKSTART]))
    done = subprocess.run(["bash", "-c", f"{run} {redirection}"], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2, done.stderr.decode()
    assert b"the output is the input file" in done.stderr
    assert rows.read_bytes() == b"".join(PROMPTS)
    assert list(tmp_path.iterdir()) == [rows]


def test_figures_do_not_take_the_place_of_answers(tmp_path: Path) -> None:
    run = " ".join(map(shlex.quote, [*SPECGEN, "run", QUICKSTART]))
    command = f"{run} --output - --stats answers.jsonl > answers.jsonl"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2, done.stderr.decode()
    assert b"answers.jsonl: the statistics file would overwrite a file of this job" in done.stderr


def test_a_job_goes_on_when_nobody_watches_it(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [*SPECGEN, "run", QUICKSTART, "-", "--set", "sampling.max_tokens=4"]
    try:
        done = subprocess.run(
            command, input=PROMPTS[0], stdout=subprocess.PIPE, stderr=write_end, timeout=120, check=False
        )
    finally:
        os.close(write_end)
    assert done.returncode == 0
    assert json.loads(done.stdout)["id"] == "story-000"
