"""Reads a trace of decode steps: what the device did, and how much of the time it had nothing to do.

Knows the Chrome trace format as torch's profiler writes it: times in microseconds; device work has the category
`kernel`, `gpu_memcpy` or `gpu_memset`, and all kernels of one graph launch share the launch's correlation id.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# The first and last share of a trace is not steady: the profiler stalls the host when it starts and stops.
_EDGE = 0.15


class DeviceEvent(NamedTuple):
    """One operation of the device. start, seconds: in seconds; launch: which launch it belongs to."""

    name: str
    category: str
    start: float
    seconds: float
    launch: int
    is_graph: bool

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds


class Idle(NamedTuple):
    """Shares of a stretch of time in which the device ran nothing.

    between: between launches, where it waits for the host. within: between the kernels of one launch.
    """

    between: float
    within: float

    @property
    def share(self) -> float:
        """All of it."""
        return self.between + self.within


def read_trace(path: Path) -> list[DeviceEvent]:
    """Return the device's operations in a trace file (also .gz), by start; none if it was made without a device."""
    items = read_json(path)
    graphs = {item["args"]["correlation"] for item in items if _is_graph_launch(item)}
    events = [_event(item, graphs) for item in items if item.get("cat") in _DEVICE_CATEGORIES and "dur" in item]
    return sorted(events, key=lambda event: event.start)


def read_json(path: Path) -> list[dict[str, Any]]:
    """Return all events of a trace file (also .gz) as they are written."""
    data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def _is_graph_launch(item: dict[str, Any]) -> bool:
    return "GraphLaunch" in str(item.get("name")) and "correlation" in item.get("args", {})


def _event(item: dict[str, Any], graphs: set[int]) -> DeviceEvent:
    args = item.get("args", {})
    launch = int(args.get("correlation", 0))
    return DeviceEvent(
        name=str(item["name"]),
        category=str(item["cat"]),
        start=float(item["ts"]) / 1e6,
        seconds=float(item["dur"]) / 1e6,
        launch=launch,
        is_graph=launch in graphs or bool(args.get("graph id", 0)),
    )


def idle(events: Sequence[DeviceEvent]) -> Idle | None:
    """Return the device's idle shares in the middle of a trace; None if it shows no device."""
    if not events:
        return None
    first, last = events[0].start, max(event.end for event in events)
    start, end = first + _EDGE * (last - first), last - _EDGE * (last - first)
    busy_until, launch = start, None
    between = within = 0.0
    for event in events:
        if event.end <= start:
            launch = event.launch
            continue
        gap = min(event.start, end) - busy_until
        if gap > 0:
            if event.launch == launch:
                within += gap
            else:
                between += gap
        if event.end > busy_until:
            busy_until, launch = event.end, event.launch
        if busy_until >= end:
            break
    length = end - start
    return Idle(between / length, within / length) if length > 0 else None
