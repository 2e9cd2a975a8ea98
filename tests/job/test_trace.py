"""Idle shares from traces that are written here."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specgen.job.trace import DeviceEvent, idle, read_trace


def kernel(name: str, start: float, length: float, launch: int) -> dict[str, Any]:
    args = {"correlation": launch, "graph id": 1}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": args}


def launches(num: int) -> list[dict[str, Any]]:
    """Steps of 100 us: two kernels of 40 us with 5 us between, and 15 us until the next step."""
    events = []
    for i in range(num):
        events += [kernel("a", 100 * i, 40, i + 1), kernel("b", 100 * i + 45, 40, i + 1)]
    return events


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1e6}
    text = json.dumps({"traceEvents": [host, {"ph": "M", "name": "process_name"}, *events]})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_gaps_between_and_within_launches(tmp_path: Path, name: str) -> None:
    events = read_trace(write(tmp_path / name, launches(100)))
    assert len(events) == 200
    found = idle(events)
    assert found is not None
    assert found.between == pytest.approx(0.15, abs=0.003)
    assert found.within == pytest.approx(0.05, abs=0.003)
    assert found.share == pytest.approx(0.20, abs=0.003)


def test_kernels_that_overlap_are_busy_once() -> None:
    def event(start: float, length: float, launch: int) -> DeviceEvent:
        return DeviceEvent("k", "kernel", start, length, launch, True)

    events = [event(i, 1.0, i) for i in range(100)] + [event(i + 0.2, 0.5, i) for i in range(100)]
    assert idle(sorted(events, key=lambda e: e.start)) == pytest.approx((0.0, 0.0))


def test_a_trace_without_a_device_has_no_idle_share(tmp_path: Path) -> None:
    assert idle(read_trace(write(tmp_path / "t.json", []))) is None
