"""Reads a trace of decode steps: what the device did, and how much of the time it had nothing to do.

Knows the Chrome trace format as torch's profiler writes it: times in microseconds; device work has the category
`kernel`, `gpu_memcpy` or `gpu_memset`, and all kernels of one graph launch share the launch's correlation id.
"""

import bisect
import gzip
import itertools
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# Kernels that read the KV cache, without those that write it.
ATTENTION = re.compile(r"(mla|gqa)_(?!inputs)|attention|attn", re.IGNORECASE)
# Without graphs, the first and last share of a trace is not steady: the profiler stalls the host at start and stop.
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
    events = [_event(item, graphs) for item in items if item.get("cat") in DEVICE_CATEGORIES and "dur" in item]
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
    """Return the device's idle shares of a step from graph launch to graph launch, or of a trace without graphs.

    Medians over steps. None if it shows no device.
    """
    if not events:
        return None
    starts = _launch_starts(events)
    if len(starts) > 3:
        steps = [_idle_between(events, *bounds) for bounds in itertools.pairwise(starts[1:])]
        return Idle(*(statistics.median(shares) for shares in zip(*filter(None, steps), strict=True)))
    first, last = events[0].start, max(event.end for event in events)
    return _idle_between(events, first + _EDGE * (last - first), last - _EDGE * (last - first))


def _idle_between(events: Sequence[DeviceEvent], start: float, end: float) -> Idle | None:
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


class OwnEvent(NamedTuple):
    """An event and the part of its time in which nothing that began before it still ran.

    A kernel that is set up while the one before it ends (programmatic dependent launch) has the waiting in its time;
    own times of all events add up to the time in which the device was busy.
    """

    event: DeviceEvent
    seconds: float


class TracedStep(NamedTuple):
    """What the device did from the start of one graph launch to the start of the next.

    period: that time, in seconds. events: the launch's own and what came behind it, copies to the host above all.
    """

    period: float
    events: list[OwnEvent]

    @property
    def busy(self) -> float:
        """Seconds in which the device ran something."""
        return sum(event.seconds for event in self.events)


def traced_steps(events: Sequence[DeviceEvent]) -> list[TracedStep]:
    """Return the steps of a trace of graph launches, by start; none without graphs.

    Without the first, of which the profiler may have missed a part, and the last, behind which none begins.
    """
    starts = _launch_starts(events)[1:]
    found = [TracedStep(after - start, []) for start, after in itertools.pairwise(starts)]
    busy_until = 0.0
    for event in events:
        own = max(0.0, event.end - max(event.start, busy_until))
        busy_until = max(busy_until, event.end)
        i = bisect.bisect_right(starts, event.start) - 1
        if 0 <= i < len(found):
            found[i].events.append(OwnEvent(event, own))
    return found


def _launch_starts(events: Sequence[DeviceEvent]) -> list[float]:
    """When each graph launch began on the device."""
    starts: dict[int, float] = {}
    for event in events:
        if event.is_graph:
            starts.setdefault(event.launch, event.start)
    return sorted(starts.values())


class Traced(NamedTuple):
    """Medians over the steps of a trace, in seconds: from start to start, busy, and in attention's kernels."""

    num_steps: int
    period: float
    busy: float
    attention: float


def summarize(steps: Sequence[TracedStep]) -> Traced | None:
    """Return the medians; None without steps."""
    if not steps:
        return None
    attention = [sum(e.seconds for e in step.events if ATTENTION.search(e.event.name)) for step in steps]
    return Traced(
        len(steps),
        statistics.median(step.period for step in steps),
        statistics.median(step.busy for step in steps),
        statistics.median(attention),
    )
