"""Many rows: memory stays flat, the first answer is out before the last row is in, and every damaged line is found."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

RUNNER = Path(__file__).parent.parent / "support" / "scale_run.py"


def run_scale(folder: Path, count: int, *sets: str, through_a_pipe: bool = False) -> dict[str, Any]:
    """Run rows through an engine that answers at once, in a process of its own; returns its figures."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with open(source, "w") as stream:
        for i in range(count):
            stream.write(json.dumps({"id": f"row-{i}", "prompt": [0, 5, 6, 7, 8, i % 4000], "pad": "x" * 100}) + "\n")
    command = [sys.executable, "-P", str(RUNNER), "-" if through_a_pipe else str(source), str(output), *sets]
    with open(source, "rb") as stream:
        done = subprocess.run(
            command, stdin=stream if through_a_pipe else None, capture_output=True, timeout=900, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout)
    with open(output, "rb") as lines:
        assert sum(1 for _ in lines) == count == figures["rows"]
    return figures


@pytest.mark.parametrize("through_a_pipe", [False, True])
def test_memory_is_flat_and_the_first_answer_early(tmp_path: Path, through_a_pipe: bool) -> None:
    figures = run_scale(tmp_path, 20_000, through_a_pipe=through_a_pipe)
    assert figures["rows_read_at_first_output"] < 1000
    assert figures["peak_over_start_mb"] < 40


@pytest.mark.slow
def test_300_000_rows(tmp_path: Path) -> None:
    for through_a_pipe in (False, True):
        (tmp_path / str(through_a_pipe)).mkdir()
        figures = run_scale(tmp_path / str(through_a_pipe), 300_000, through_a_pipe=through_a_pipe)
        print(figures, os.getloadavg())
        assert figures["rows_read_at_first_output"] < 1000
        assert figures["peak_over_start_mb"] < 150


DAMAGE: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"id": "x%d", "prompt": "a sto', "bad_json"),
    "no JSON": (b"id: x%d", "bad_json"),
    "NUL": (b'{"id": "x%d", "prompt": "a\0b"}', "bad_json"),
    "NaN": (b'{"id": "x%d", "prompt": "a", "score": NaN}', "bad_json"),
    "twice the same key": (b'{"id": "x%d", "prompt": "a", "prompt": "b"}', "bad_json"),
    "bad UTF-8": (b'{"id": "x%d", "prompt": "\xc3("}', "bad_utf8"),
    "no object": (b'["x%d"]', "not_an_object"),
    "half a surrogate pair": (b'{"id": "x%d", "prompt": "a\\ud800"}', "bad_text"),
    "blank": (b"  \t", ""),
}


def test_every_damaged_line_is_found_where_it_is(workplace: Any, fake_engine: Any) -> None:
    count = 10_000
    rng = random.Random(9)
    places = rng.sample(range(2, count + 1), count // 100)
    kinds = {line: list(DAMAGE)[number % len(DAMAGE)] for number, line in enumerate(places)}
    lines = []
    for line in range(1, count + 1):
        damage = DAMAGE[kinds[line]][0] if line in kinds else b'{"id": "r%d", "prompt": [5, 6]}'
        lines.append(damage % line if b"%d" in damage else damage)
    ends = [b"\r\n" if rng.random() < 0.3 else b"\n" for _ in lines]
    content = b"\xef\xbb\xbf" + b"".join(line + end for line, end in zip(lines, ends, strict=True))
    workplace.input.write_bytes(content.rstrip(b"\n"))
    stats = workplace.run(fake_engine(max_running=1000), "engine.max_num_seqs=1000", "output.order=completion")
    records = workplace.records()
    found = {record["error"]["line"]: record["error"]["code"] for record in records if record["error"]}
    assert found == {line: DAMAGE[kind][1] for line, kind in kinds.items() if kind != "blank"}
    num_blank = Counter(kinds.values())["blank"]
    assert num_blank > 5
    assert stats.blank_lines == num_blank
    assert stats.ok + stats.failed + stats.blank_lines == count
    assert len(records) == count - num_blank
    assert sorted(record["index"] for record in records) == list(range(len(records)))
