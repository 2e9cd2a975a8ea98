"""Runs that are killed, stopped and starved, and then go on: the end is that of a run that nothing ever happened to."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUM_ROWS = 120
RUNNER = Path(__file__).parent.parent / "support" / "killable_run.py"
CANNOT_WAIT = "lines that wait for an earlier one cannot be put aside: File too large"
RECIPE = """
model: {path: stories-7m}
sampling: {seed: 7, max_tokens: 12}
input: {path: in.jsonl}
output: {path: out.jsonl, order: %s}
engine: {max_num_seqs: 8, max_model_len: 64}
"""


class Runs:
    """Runs of one recipe in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.waiting = folder / "out.jsonl.waiting"
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(RUNNER)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(RUNNER.parent)},
        )

    def run(self, *args: str, **how: Any) -> int:
        """Run the recipe and return the exit status, negative for a signal."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"args": ["run", "job.yaml", "-q", *args], **how}).encode() + b"\n")
        stdin.flush()
        return int(stdout.readline())

    def write_rows(self, order: str = "input", count: int = NUM_ROWS) -> None:
        """Write recipe and input: rows with ids, rows without, repeated ones, and broken ones."""
        (self.folder / "job.yaml").write_text(RECIPE % order)
        lines = []
        for i in range(count):
            row: dict[str, Any] = {"prompt": f"a story about {i % 40}"}
            if i % 3:
                row["id"] = f"é{i}"
            lines.append('{"broken' if i % 17 == 5 else json.dumps(row, ensure_ascii=False))
        (self.folder / "in.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def lines(self) -> list[bytes]:
        """Return the output's lines, every one of them whole and parsable."""
        lines = self.output.read_bytes().split(b"\n")
        assert lines.pop() == b""
        for line in lines:
            json.loads(line)
        return lines

    def told(self) -> str:
        """Return what the last run wrote to stderr."""
        return (self.folder / "stderr.txt").read_text()

    def remove(self) -> None:
        """Take the output away."""
        for path in self.folder.glob("out.jsonl*"):
            path.unlink()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture
def runs(shared_runs: Runs) -> Runs:
    for path in shared_runs.folder.iterdir():
        path.unlink()
    shared_runs.write_rows()
    return shared_runs


def whole_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.exists() else b""
    return content.split(b"\n")[:-1]


def unbroken(runs: Runs, *args: str) -> list[bytes]:
    assert runs.run(*args) == 3
    lines = runs.lines()
    runs.remove()
    return lines


def test_killed_at_25_places_and_resumed_the_output_is_that_of_an_unbroken_run(runs: Runs) -> None:
    for order, seed in (("input", 1), ("completion", 2)):
        runs.write_rows(order)
        whole = unbroken(runs)
        assert len(whole) == len(set(whole)) == NUM_ROWS
        size = sum(len(line) + 1 for line in whole)
        rng = random.Random(seed)
        for offset in [1, size - 1, *(rng.randrange(2, size) for _ in range(11 if order == "input" else 10))]:
            assert runs.run(at_byte=[offset, signal.SIGKILL]) == -signal.SIGKILL
            assert runs.output.stat().st_size == offset
            assert runs.run() == 3
            lines = runs.lines()
            assert lines == whole if order == "input" else sorted(lines) == sorted(whole)
            runs.remove()


def test_killed_at_25_places_nothing_that_had_finished_is_run_again(runs: Runs) -> None:
    """Half of them in the middle of a line that is put aside, since it must wait for an earlier row's."""
    whole = unbroken(runs)
    by_index = {json.loads(line)["index"]: line for line in whole}
    size = sum(len(line) + 1 for line in whole)
    rng = random.Random(5)
    num_waited = 0
    for number in range(25):
        where = "waiting_at_byte" if number % 2 else "at_byte"
        assert runs.run(**{where: [rng.randrange(1, size // 2), signal.SIGKILL]}) == -signal.SIGKILL
        written, waiting = (whole_lines(path) for path in (runs.output, runs.waiting))
        assert set(written) | set(waiting) <= set(whole)
        num_waited += len(set(waiting) - set(written))
        assert runs.run("--stats", "stats.json") == 3
        stats = json.loads((runs.folder / "stats.json").read_text())
        assert stats["samples"] == NUM_ROWS - len(set(written) | set(waiting))
        assert runs.lines() == [by_index[index] for index in range(NUM_ROWS)]
        assert not runs.waiting.exists()
        runs.remove()
    assert num_waited > 50


def test_the_first_row_is_the_last_to_finish_and_the_run_is_killed(runs: Runs) -> None:
    """Nothing is in the output yet; all is in the file of lines that wait, which --fresh moves aside."""
    whole = unbroken(runs)
    assert runs.run(waiting_at_byte=[1500, signal.SIGKILL]) == -signal.SIGKILL
    runs.output.write_bytes(b"")
    waiting = whole_lines(runs.waiting)
    assert len(waiting) > 1
    assert runs.run("--stats", "stats.json") == 3
    assert json.loads((runs.folder / "stats.json").read_text())["samples"] == NUM_ROWS - len(waiting)
    assert runs.lines() == whole
    runs.remove()
    assert runs.run(waiting_at_byte=[1500, signal.SIGKILL]) == -signal.SIGKILL
    waiting = whole_lines(runs.waiting)
    assert runs.run("--fresh") == 3
    assert runs.lines() == whole
    assert whole_lines(runs.folder / "out.jsonl.waiting.old") == waiting


def test_killed_over_and_over(runs: Runs) -> None:
    whole = unbroken(runs)
    size = sum(len(line) + 1 for line in whole)
    for offset in range(size // 7, size, size // 7):
        assert runs.run(at_byte=[offset, signal.SIGKILL]) == -signal.SIGKILL
    assert runs.run() == 3
    assert runs.lines() == whole
    assert runs.run() == 3  # nothing is left to do, and it says so
    assert runs.lines() == whole


def test_signalled_at_25_places_and_resumed(runs: Runs) -> None:
    """SIGTERM comes in the middle of a write; a second signal before that write goes on leaves half a line."""
    whole = unbroken(runs)
    size = sum(len(line) + 1 for line in whole)
    rng = random.Random(3)
    for number, offset in enumerate(rng.randrange(1, size * 3 // 4) for _ in range(25)):
        is_twice = number % 3 == 2
        signals = [signal.SIGINT, signal.SIGTERM] if is_twice else [signal.SIGTERM]
        sets = ["--set", f"output.on_interrupt={'finish' if number % 2 else 'drop'}"]
        assert runs.run(*sets, at_byte=[offset, *signals]) == 143
        if is_twice:
            assert runs.output.stat().st_size == offset
        else:
            assert set(runs.lines()) < set(whole)
        assert runs.run(*sets) == 3
        assert runs.lines() == whole
        runs.remove()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signalled_and_resumed(runs: Runs, number: int, code: int) -> None:
    for on_interrupt in ("drop", "finish"):
        sets = ["--set", f"output.on_interrupt={on_interrupt}"]
        whole = unbroken(runs, *sets)
        assert runs.run(*sets, signal_at=[40, number]) == code
        some = runs.lines()
        assert 0 < len(some) < NUM_ROWS
        assert set(some) < set(whole)
        assert runs.run(*sets) == 3
        assert runs.lines() == whole
        runs.remove()


def test_a_full_disk_leaves_whole_lines_and_the_run_goes_on_when_there_is_room(runs: Runs) -> None:
    whole = unbroken(runs)
    size = sum(len(line) + 1 for line in whole)
    rng = random.Random(4)
    for limit in sorted(rng.randrange(len(whole[0]) + 1, size) for _ in range(6)):
        assert runs.run(max_bytes=limit) == 2
        some = runs.lines()
        assert len(set(some)) == len(some)
        assert set(some) < set(whole)
        # The limit holds for the file of lines that wait too, which now and then meets it first.
        if CANNOT_WAIT not in runs.told():
            assert "writing the output failed: File too large" in runs.told()
            assert some
    assert runs.run() == 3
    assert runs.lines() == whole


def test_a_line_that_cannot_wait_on_a_full_disk_is_named_and_the_run_goes_on(runs: Runs) -> None:
    rows = (runs.folder / "in.jsonl").read_text(encoding="utf-8").split("\n", 1)
    first = {"prompt": "a story about " * 10, "sampling": {"max_tokens": 50}}
    (runs.folder / "in.jsonl").write_text(json.dumps(first) + "\n" + rows[1], encoding="utf-8")
    short = ("--set", "sampling.max_tokens=2")
    whole = unbroken(runs, *short)
    limit = 9000  # the run's manifest has less
    assert runs.run(*short, max_bytes=limit) == 2
    assert CANNOT_WAIT in runs.told()
    some = runs.lines()
    assert 0 < len(some) < NUM_ROWS
    assert set(some) < set(whole[1:])
    assert runs.run(*short) == 3
    assert runs.lines() == whole


def test_a_small_file_system_fills(runs: Runs, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=56k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        whole = unbroken(runs)
        output = tmp_path / "out.jsonl"
        filler = tmp_path / "filler"
        filler.write_bytes(bytes(16 << 10))
        assert runs.run("--output", str(output)) == 2
        assert "No space left on device" in runs.told()
        some = output.read_bytes().split(b"\n")
        assert some.pop() == b""
        assert len(set(some)) == len(some)
        assert set(some) < set(whole)
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=1m", tmp_path], check=True)
        assert runs.run("--output", str(output)) == 3
        assert output.read_bytes().split(b"\n")[:-1] == whole
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_reader_that_leaves_has_whole_lines_and_ends_the_run(runs: Runs) -> None:
    whole = unbroken(runs)
    sizes = [len(line) + 1 for line in whole]
    for num_lines in (1, 30):
        assert runs.run("--output", "-", reader_bytes=sum(sizes[:num_lines]) + 7) == 130
        read = (runs.folder / "read.bin").read_bytes().split(b"\n")
        assert read[:-1] == whole[:num_lines]
        assert whole[num_lines].startswith(read[-1])
        assert "Traceback" not in runs.told()
        assert "nobody reads the output any more" in runs.told()
        assert "was written" not in runs.told()
