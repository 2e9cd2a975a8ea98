"""Which steps are traced, and that a trace is written in the thread that runs them."""

import json
from pathlib import Path

import pytest
import torch

from specgen.worker.trace import StepTrace


def test_steady_steps_are_traced_and_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = StepTrace(path, num_rows=4, num_steps=3)
    rows = [0, 4, 4, 0, *[4] * 20]
    marks: list[int] = []
    for i, decode_rows in enumerate(rows):
        trace.before_step(decode_rows)
        if not trace.is_done:
            marks.append(i)
        with torch.profiler.record_function(f"step {i}"):
            torch.ones(2).add_(1)
    # the run of steady steps begins at 4: 3 to settle, 3 that the profiler warms up in, then 3 in the trace
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {"step 10", "step 11", "step 12"}
    assert trace.is_done
    assert marks[-1] == 12


def test_rows_that_end_early_end_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(tmp_path / "t.json", num_rows=4, num_steps=30)
    for decode_rows in [4] * 12 + [3] * 3:
        trace.before_step(decode_rows)
    assert trace.is_done
    assert "ended early" in caplog.text


def test_steps_for_a_trace_leave_room() -> None:
    assert [StepTrace.steps_for(n) for n in (0, 9, 10, 20, 1000)] == [0, 0, 2, 12, 32]
