"""Idle shares from traces that are written here."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specgen.job.trace import DeviceEvent, idle, read_trace, summarize, traced_steps


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
    assert (found.between, found.within, found.share) == pytest.approx((0.15, 0.05, 0.20)), "whole launches only"


def test_kernels_that_overlap_are_busy_once() -> None:
    def event(start: float, length: float, launch: int) -> DeviceEvent:
        return DeviceEvent("k", "kernel", start, length, launch, True)

    events = [event(i, 1.0, i) for i in range(100)] + [event(i + 0.2, 0.5, i) for i in range(100)]
    assert idle(sorted(events, key=lambda e: e.start)) == pytest.approx((0.0, 0.0))


def test_a_trace_without_a_device_has_no_idle_share(tmp_path: Path) -> None:
    assert idle(read_trace(write(tmp_path / "t.json", []))) is None


def decode_step(start: float, launch: int) -> list[dict[str, Any]]:
    """200 us in microseconds: kernels set up early (each waits 5 us in its time), and a copy behind them.

    busy 20 + 30 + 40 + 8 = 98, of which attention 30 + 40; idle 2 before the copy, 100 behind it.
    """
    events = [
        kernel("_mla_inputs_kernel", start, 20, launch),
        kernel("mla_scores_kernel", start + 15, 35, launch),
        kernel("mla_values_kernel", start + 45, 45, launch),
        kernel("Memcpy DtoH", start + 92, 8, 10_000 + launch),
    ]
    events[-1]["cat"] = "gpu_memcpy"
    del events[-1]["args"]["graph id"]
    return events


def test_steps_of_overlapping_kernels_are_no_longer_than_the_clock_says(tmp_path: Path) -> None:
    events = [event for i in range(8) for event in decode_step(200 * i, i + 1)]
    steps = traced_steps(read_trace(write(tmp_path / "t.json", events[1:])))
    assert len(steps) == 6, "neither the first, which is there in part, nor the last, behind which none begins"
    for step in steps:
        assert step.period == pytest.approx(200e-6)
        assert [own.seconds for own in step.events] == pytest.approx([20e-6, 30e-6, 40e-6, 8e-6])
        assert sum(own.event.seconds for own in step.events) == pytest.approx(108e-6), "10 us of waiting"
    found = summarize(steps)
    assert found is not None
    assert (found.num_steps, found.period, found.busy, found.attention) == pytest.approx((6, 2e-4, 98e-6, 70e-6))
    late = [dict(event, ts=event["ts"] + (1e6 if event["ts"] > 790 else 0)) for event in events]
    shares = idle(read_trace(write(tmp_path / "t.json", late)))  # a second in which something was captured
    assert shares == pytest.approx((0.51, 0.0))
    assert shares is not None and shares.share == pytest.approx(1 - found.busy / found.period)


def test_a_trace_without_graphs_has_no_steps(tmp_path: Path) -> None:
    events = launches(10)
    for event in events:
        event["args"] = {"correlation": event["ts"]}
    assert traced_steps(read_trace(write(tmp_path / "t.json", events))) == []
    assert summarize([]) is None
