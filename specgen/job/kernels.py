"""Every kernel of a decode step: how often, how long, for which part of the model, and what that part must move.

Reads two traces: one of graph replays, for the times, and one of the same steps run one operation at a time inside
ranges named after the model's modules (`specgen.worker.labels`), for where each kernel belongs. Both launch the same
kernels in the same order, so that the n-th launch of a name in a step is the same one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specgen.job.floor import Ceilings, Cost
from specgen.job.trace import DeviceEvent, read_json, read_trace

_PART, _MODULE = "part:", "module:"
# Library and own kernels that multiply by weights.
_PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|linear|matmul|bmm|splitk", re.IGNORECASE)
_ATTENTION = re.compile(r"(mla|gqa)_(?!inputs)|attention|attn", re.IGNORECASE)
_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_PROJECTIONS = frozenset({"eh_proj", "projection"})
# Kinds of the cost model that are one kind here: kernels may serve several of them at once.
_MERGED = {"router": "experts", "shared experts": "experts"}

Kind = tuple[str, str]
OTHER = "other"


class Launch(NamedTuple):
    """Where a kernel was launched: the part of the step, and the modules around it, (name, class), outermost first."""

    part: str
    modules: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class KernelRow:
    """One kernel within one kind of work: launches and seconds a step."""

    name: str
    launches: float = 0.0
    seconds: float = 0.0


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


@dataclass(slots=True)
class KernelTable:
    """A decode step of `rows` rows: its kinds of work, the longest first. `steps` were looked at."""

    rows: int
    num_tokens: int
    steps: int
    kinds: list[KindRow]

    @property
    def seconds(self) -> float:
        """All kernels' time in a step; gaps between them are not in it."""
        return sum(kind.seconds for kind in self.kinds)

    def as_dict(self, ceilings: Ceilings) -> dict[str, object]:
        """Return the table as plain JSON values."""
        return {
            "rows": self.rows,
            "num_tokens": self.num_tokens,
            "steps": self.steps,
            "ms": round(1e3 * self.seconds, 4),
            "kinds": [
                {
                    "part": kind.part,
                    "name": kind.name,
                    "ms": round(1e3 * kind.seconds, 4),
                    "bytes": round(kind.cost.num_bytes) if kind.cost else None,
                    "flops": round(kind.cost.flops) if kind.cost else None,
                    "floor_ms": round(1e3 * kind.cost.seconds(ceilings), 4) if kind.cost else None,
                    "kernels": [
                        {"name": k.name, "launches": round(k.launches, 2), "ms": round(1e3 * k.seconds, 5)}
                        for k in kind.kernels
                    ],
                }
                for kind in self.kinds
            ],
        }


def kernel_table(replays: Path, labelled: Path, rows: int, num_tokens: int, cost: Cost | None) -> KernelTable:
    """Return the table of a step of `rows` rows and K = `num_tokens` from two traces; `cost` is the step's."""
    places = read_launches(labelled)
    events = read_trace(replays)
    launches = sorted({event.launch for event in events if event.is_graph})[1:-1]
    kinds: dict[Kind, dict[str, KernelRow]] = {}
    by_launch: dict[int, list[DeviceEvent]] = {launch: [] for launch in launches}
    for event in events:
        if event.launch in by_launch:
            by_launch[event.launch].append(event)
    for step in by_launch.values():
        count: dict[str, int] = {}
        for event in step:
            nth = count[event.name] = count.get(event.name, -1) + 1
            kind = kind_of(places.get((event.name, nth)), event.name)
            row = kinds.setdefault(kind, {}).setdefault(event.name, KernelRow(event.name))
            row.launches += 1 / len(launches)
            row.seconds += event.seconds / len(launches)
    costs = _merged(cost) if cost is not None else {}
    table = [
        KindRow(*kind, sorted(kernels.values(), key=lambda k: -k.seconds), costs.get(kind))
        for kind, kernels in kinds.items()
    ]
    return KernelTable(rows, num_tokens, len(launches), sorted(table, key=lambda kind: -kind.seconds))


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
        return part, "attention" if leaf == "self_attn" and _ATTENTION.search(kernel) else OTHER
    if "mlp" in names and leaf != "mlp":
        return part, "mlp"
    if leaf in _PROJECTIONS:
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


def read_launches(path: Path) -> dict[tuple[str, int], Launch]:
    """Return where the n-th launch of each kernel name in a labelled step comes from, by (name, n).

    Looks at one step in the middle of the trace; empty if it shows no device.
    """
    items = read_json(path)
    events = [item for item in items if item.get("ph") == "X" and "ts" in item]
    steps = sorted(
        (item for item in events if item.get("cat") == "user_annotation" and item["name"].startswith("ProfilerStep")),
        key=lambda item: item["ts"],
    )
    if not steps:
        return {}
    step = steps[len(steps) // 2]
    during = [item for item in events if _within(item["ts"], step)]
    ranges = [i for i in during if i.get("cat") == "user_annotation" and i["name"].startswith((_PART, _MODULE))]
    kernels = {
        item["args"]["correlation"]: item["name"]
        for item in events
        if item.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "correlation" in item.get("args", {})
    }
    launches = [i for i in during if i.get("cat") in _HOST and i.get("args", {}).get("correlation") in kernels]
    places: dict[tuple[str, int], Launch] = {}
    count: dict[str, int] = {}
    for launch, inside in _with_ranges(launches, ranges):
        name = kernels[launch["args"]["correlation"]]
        nth = count[name] = count.get(name, -1) + 1
        places[name, nth] = _launch(inside)
    return places


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
    part = ""
    modules = []
    for name in names:
        if name.startswith(_PART):
            part = name.removeprefix(_PART)
        else:
            attribute, _, kind = name.removeprefix(_MODULE).partition(":")
            modules.append((attribute, kind))
    return Launch(part, tuple(modules))
