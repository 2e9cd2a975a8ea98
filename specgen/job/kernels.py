"""Every kernel of a decode step: how often, how long, for which part of the model, and what that part must move.

Reads two traces: one of graph replays, for the times, and one of the same steps run one operation at a time inside
ranges named after the model's modules (`specgen.worker.labels`), for where each kernel belongs. Both launch almost the
same kernels in the same order, so that the one step can be laid beside the other.
"""

import difflib
import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specgen.errors import EngineError
from specgen.job.floor import Ceilings, Cost
from specgen.job.trace import ATTENTION, DEVICE_CATEGORIES, OwnEvent, read_json, read_trace, traced_steps

_PART, _MODULE = "part:", "module:"
# Library and own kernels that multiply by weights.
_PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|linear|matmul|bmm|splitk", re.IGNORECASE)
_HOST = frozenset({"cuda_runtime", "cuda_driver"})
# Kinds of the cost model that are one kind here: kernels may serve several of them at once.
_MERGED = {"router": "experts", "shared experts": "experts"}

Kind = tuple[str, str]
OTHER = "other"
# Copies to and from the host, behind one step's graph and before the next one's.
BETWEEN: Kind = ("", "between steps")


class Launch(NamedTuple):
    """Where a kernel was launched: the part of the step, and the modules around it, (name, class), outermost first.

    num_bytes: of the innermost module's weights, 0 if it does more than one product with them.
    """

    part: str
    modules: tuple[tuple[str, str], ...]
    num_bytes: int = 0


@dataclass(slots=True)
class KernelRow:
    """One kernel within one kind of work: launches and seconds a step, and bytes of the weights it multiplies by.

    seconds: without the time in which the kernel before it still ran. num_bytes: 0 where it has no weight of its own.
    """

    name: str
    launches: float = 0.0
    seconds: float = 0.0
    num_bytes: float = 0.0


@dataclass(slots=True)
class KindRow:
    """One kind of work in a step, by its kernels, the longest first; bytes, flops and floor if it has a cost."""

    part: str
    name: str
    kernels: list[KernelRow] = field(default_factory=list)
    cost: Cost | None = None

    @property
    def seconds(self) -> float:
        """The kernels' time in a step."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def launches(self) -> float:
        """Their launches in a step."""
        return sum(kernel.launches for kernel in self.kernels)

    def floor_of(self, kernel: KernelRow, ceilings: Ceilings) -> float | None:
        """A kernel's part of the floor, by its weights among those of the kind; None if it has none of its own."""
        if self.cost is None or not kernel.num_bytes:
            return None
        return self.cost.seconds(ceilings) * kernel.num_bytes / sum(other.num_bytes for other in self.kernels)


@dataclass(slots=True)
class KernelTable:
    """A decode step of `rows` rows with `context` tokens each: its kinds of work, the longest first.

    steps: that were looked at. period: seconds from the start of one to the start of the next, in the trace;
    untraced: the same without a profiler, None if it is not known. Both are medians.
    """

    rows: int
    context: float
    num_tokens: int
    steps: int
    period: float
    kinds: list[KindRow]
    untraced: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step, in which the device was busy."""
        return sum(kind.seconds for kind in self.kinds)

    @property
    def idle_share(self) -> float:
        """Share of a step in the trace in which it was not."""
        return max(0.0, 1 - self.seconds / self.period) if self.period else 0.0

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds that the step needs at the least; 0.0 without a cost model."""
        return sum(kind.cost.seconds(ceilings) for kind in self.kinds if kind.cost is not None)

    def as_dict(self, ceilings: Ceilings) -> dict[str, object]:
        """Return the table as plain JSON values."""
        return {
            "rows": self.rows,
            "context": round(self.context, 1),
            "num_tokens": self.num_tokens,
            "steps": self.steps,
            "ms": round(1e3 * self.period, 4),
            "busy_ms": round(1e3 * self.seconds, 4),
            "untraced_ms": round(1e3 * self.untraced, 4) if self.untraced is not None else None,
            "idle_share": round(self.idle_share, 4),
            "floor_ms": round(1e3 * self.floor(ceilings), 4),
            "kinds": [self._kind(kind, ceilings) for kind in self.kinds],
        }

    def _kind(self, kind: KindRow, ceilings: Ceilings) -> dict[str, object]:
        floor = kind.cost.seconds(ceilings) if kind.cost is not None else None
        return {
            "part": kind.part,
            "name": kind.name,
            "launches": round(kind.launches, 2),
            "ms": round(1e3 * kind.seconds, 5),
            "bytes": round(kind.cost.num_bytes) if kind.cost is not None else None,
            "flops": round(kind.cost.flops) if kind.cost is not None else None,
            "floor_ms": round(1e3 * floor, 5) if floor is not None else None,
            "floor_share": round(floor / kind.seconds, 4) if floor is not None and kind.seconds else None,
            "kernels": [
                {
                    "name": k.name,
                    "launches": round(k.launches, 2),
                    "ms": round(1e3 * k.seconds, 5),
                    "bytes": round(k.num_bytes) or None,
                    "floor_ms": round(1e3 * own, 5) if (own := kind.floor_of(k, ceilings)) is not None else None,
                }
                for k in kind.kernels
            ],
        }


def kernel_table(
    replays: Path,
    labelled: Path,
    rows: int,
    context: float,
    num_tokens: int,
    cost: Cost | None,
    untraced: float | None = None,
) -> KernelTable:
    """Return the table of a step of `rows` rows and K = `num_tokens` from two traces; `cost` is the step's.

    Raises: EngineError if the first trace shows no graph launches.
    """
    places = read_launches(labelled)
    steps = traced_steps(read_trace(replays))
    if not steps:
        raise EngineError(f"the trace of {rows} rows shows no graph launches on the device")
    kinds: dict[Kind, dict[str, KernelRow]] = {}
    known: dict[tuple[str, ...], list[Launch | None]] = {}
    for step in steps:
        launched = [own for own in step.events if own.event.is_graph]
        names = tuple(own.event.name for own in launched)
        if names not in known:
            known[names] = place(names, places)
        for own, where in zip(launched, known[names], strict=True):
            _count(kinds, kind_of(where, own.event.name), own, where, len(steps))
        for own in step.events:
            if not own.event.is_graph:
                _count(kinds, BETWEEN, own, None, len(steps))
    costs = _merged(cost) if cost is not None else {}
    table = [
        KindRow(*kind, sorted(kernels.values(), key=lambda k: -k.seconds), costs.pop(kind, None))
        for kind, kernels in kinds.items()
    ]
    table += [KindRow(*kind, [], left) for kind, left in costs.items()]  # no kernel was found for it: to be seen
    period = statistics.median(step.period for step in steps)
    table.sort(key=lambda kind: -kind.seconds)
    return KernelTable(rows, context, num_tokens, len(steps), period, table, untraced)


def _count(
    kinds: dict[Kind, dict[str, KernelRow]], kind: Kind, own: OwnEvent, where: Launch | None, num_steps: int
) -> None:
    name = own.event.name
    row = kinds.setdefault(kind, {}).setdefault(name, KernelRow(name))
    row.launches += 1 / num_steps
    row.seconds += own.seconds / num_steps
    if where is not None and _PRODUCT.search(name) and "reduce" not in name.lower():
        row.num_bytes += where.num_bytes / num_steps


def place(names: Sequence[str], labelled: Sequence[tuple[str, Launch]]) -> list[Launch | None]:
    """Return where each kernel of a replayed step belongs, by a labelled step with almost the same kernels in order.

    A graph's step is prepared by other kernels, and may choose another one for the same work. As many kernels between
    two common ones are the same work; else they belong to the modules that their neighbours have in common.
    """
    found: list[Launch | None] = [None] * len(names)
    matcher = difflib.SequenceMatcher(None, [name for name, _ in labelled], names, autojunk=False)
    for _, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        if to_a - from_a == to_b - from_b:
            found[from_b:to_b] = [where for _, where in labelled[from_a:to_a]]
    return _filled(found)


def _filled(places: Sequence[Launch | None]) -> list[Launch | None]:
    """The gaps filled with what the nearest places before and behind have in common."""
    behind: list[Launch | None] = [None] * len(places)
    following: Launch | None = None
    for i in range(len(places) - 1, -1, -1):
        following = behind[i] = places[i] or following
    filled: list[Launch | None] = []
    before: Launch | None = None
    for known, after in zip(places, behind, strict=True):
        before = known or before
        neighbours = [near for near in (before, after) if near is not None]
        if known is not None or not neighbours:
            filled.append(known)
            continue
        common: list[tuple[str, str]] = []
        if len(neighbours) == 2:
            pairs = zip(*(near.modules for near in neighbours), strict=False)
            common = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        filled.append(Launch(neighbours[0].part, tuple(common)))
    return filled


def kind_of(place: Launch | None, kernel: str) -> Kind:
    """Return the part of the step and the kind of work, named as the cost model names them, or "other"."""
    if place is None:
        return "", OTHER
    part = "draft" if place.part == "draft" else "target"
    modules = [(name, kind) for name, kind in place.modules if name != "wide"]  # stands in for what it is a part of
    names = [name for name, _ in modules]
    classes = [kind for _, kind in modules]
    leaf = names[-1] if names else ""
    if "MoE" in classes:
        return part, "experts"
    if "self_attn" in names:
        if leaf.endswith("_proj") or (leaf == "self_attn" and _PRODUCT.search(kernel)):
            return part, "attention products"
        return part, "attention" if leaf == "self_attn" and ATTENTION.search(kernel) else OTHER
    if "mlp" in names and leaf != "mlp":
        return part, "mlp"
    if leaf == "eh_proj":
        return part, "eh_proj"
    if (
        "lm_head" in names
        or not {"Head", "CutHead"}.isdisjoint(classes)
        or (leaf.isdigit() and "Float8Linear" in classes)
    ):
        return part, "head"
    return (part if place.part != "sampling" else "sampling"), OTHER


def _merged(cost: Cost) -> dict[Kind, Cost]:
    kinds: dict[Kind, Cost] = {}
    for (part, name), kind in cost.kinds.items():
        key = part, _MERGED.get(name, name)
        kinds[key] = Cost((*kinds.get(key, Cost(())).ops, *kind.ops))
    return kinds


def read_launches(path: Path) -> list[tuple[str, Launch]]:
    """Return the kernels of a labelled step, in the order in which the device ran them, and where each comes from.

    Looks at one step in the middle of the trace; empty if it shows no device.
    """
    events = [item for item in read_json(path) if item.get("ph") == "X" and "ts" in item]
    steps = sorted(
        (item for item in events if item.get("cat") == "user_annotation" and item["name"].startswith("ProfilerStep")),
        key=lambda item: item["ts"],
    )
    if not steps:
        return []
    step = steps[len(steps) // 2]
    during = [item for item in events if _within(item["ts"], step)]
    ranges = [i for i in during if i.get("cat") == "user_annotation" and i["name"].startswith((_PART, _MODULE))]
    launches = [i for i in during if i.get("cat") in _HOST and "correlation" in i.get("args", {})]
    places = {launch["args"]["correlation"]: _launch(inside) for launch, inside in _with_ranges(launches, ranges)}
    device = sorted((i for i in events if i.get("cat") in DEVICE_CATEGORIES), key=lambda item: item["ts"])
    found = [(str(i["name"]), places.get(i.get("args", {}).get("correlation"))) for i in device]
    known = [i for i, (_, where) in enumerate(found) if where is not None]
    if not known:
        return []
    # a kernel in the midst of them whose launch the profiler did not see is of this step too
    found = found[known[0] : known[-1] + 1]
    filled = _filled([where for _, where in found])
    return [(name, where) for (name, _), where in zip(found, filled, strict=True) if where is not None]


def _within(ts: float, item: dict[str, Any]) -> bool:
    return bool(item["ts"] <= ts <= item["ts"] + item["dur"])


def _with_ranges(
    launches: list[dict[str, Any]], ranges: list[dict[str, Any]]
) -> "list[tuple[dict[str, Any], list[str]]]":
    """Pair each launch, in order of time, with the names of the ranges around it, outermost first."""
    ranges = sorted(ranges, key=lambda item: (item["ts"], -item["dur"]))
    found, stack, following = [], [], 0
    for launch in sorted(launches, key=lambda item: item["ts"]):
        while following < len(ranges) and ranges[following]["ts"] <= launch["ts"]:
            stack.append(ranges[following])
            following += 1
        stack = [item for item in stack if _within(launch["ts"], item)]
        found.append((launch, [item["name"] for item in stack]))
    return found


def _launch(names: Sequence[str]) -> Launch:
    part, modules, num_bytes = "", [], 0
    for name in names:
        if name.startswith(_PART):
            part = name.removeprefix(_PART)
        else:
            attribute, kind, size = name.removeprefix(_MODULE).split(":")
            modules.append((attribute, kind))
            num_bytes = int(size)
    return Launch(part, tuple(modules), num_bytes)
