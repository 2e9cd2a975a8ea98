"""The kernel table from two traces that are written here: one of graph replays, one of labelled steps."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.console

from specgen.cli.render_profile import kernel_view, markdown
from specgen.errors import EngineError
from specgen.job.floor import Ceilings, Cost, Op
from specgen.job.kernels import Launch, kernel_table, kind_of, place, read_launches


def complete(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, **more}


class Labelled:
    """Writes a labelled step: ranges and launches on the host, kernels on the device somewhat later."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0.0
        self.correlation = 0

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        event = complete("user_annotation", name, self.now, 0.0)
        self.events.append(event)
        # torch's profiler shows the range on the device's timeline, too
        self.events.append(complete("gpu_user_annotation", name, self.now + 1000, 1.0, tid=7))
        self.now += 1
        yield
        event["dur"] = self.now - event["ts"]
        self.now += 1

    def launch(self, kernel: str, *, driver: bool = False, is_seen: bool = True) -> None:
        self.correlation += 1
        args = {"correlation": self.correlation}
        cat, name = ("cuda_driver", "cuLaunchKernelEx") if driver else ("cuda_runtime", "cudaLaunchKernel")
        if is_seen:
            self.events.append(complete(cat, name, self.now, 0.5, args=args))
        # on the device, each kernel begins (as the next one's time is set up) 20 % before the last one ends
        args = args | {"stream": 7, "External id": 17}
        self.events.append(complete("kernel", kernel, self.now + 1000, 1.2, tid=7, args=args))
        self.now += 1


def labelled_steps(num: int) -> list[dict[str, Any]]:
    """Each step: a norm, two products and attention in the target; the head twice, the second time for a draft."""
    t = Labelled()
    for i in range(num):
        with t.range(f"ProfilerStep#{i}"):
            t.launch("eager_preparation")
            with t.range("part:target"), t.range("module:0:DecoderLayer:0"):
                with t.range("module:input_layernorm:RMSNorm:0"):
                    t.launch("_rms_norm_kernel", driver=True)
                with t.range("module:self_attn:MLAAttention:0"):
                    with t.range("module:qkv_a_proj:Linear:3000"):
                        t.launch("nvjet_tile")
                    t.launch("_mla_inputs_kernel", driver=True)
                    t.launch("bmm_kernel")
                    t.launch("mla_scores_kernel", driver=True)
                    t.launch("mla_values_kernel", driver=True)
                    t.launch("bmm_kernel")
                    with t.range("module:o_proj:Linear:1000"):
                        t.launch("nvjet_tile")
                        t.launch("splitKreduce_kernel")
                with t.range("module:post_attention_layernorm:RMSNorm:0"):
                    t.launch("_rms_norm_kernel", driver=True, is_seen=False)
            for part_name in ("sampling", "draft"):
                with t.range(f"part:{part_name}"):
                    with t.range("module:lm_head:Head:8000000"):
                        t.launch("nvjet_head" if part_name == "sampling" else "nvjet_tile")
                    t.launch("_block_best_kernel", driver=True)
    return t.events


# A step as a graph has it, and how long each kernel runs: other preparation, another form of attention (one kernel in
# place of two), another tile for o_proj.
REPLAYED = [
    ("graph_preparation_a", 2.0),
    ("graph_preparation_b", 2.0),
    ("_rms_norm_kernel", 1.0),
    ("nvjet_tile", 10.0),
    ("_mla_inputs_kernel", 3.0),
    ("bmm_kernel", 4.0),
    ("mla_split_kernel", 20.0),
    ("bmm_kernel", 4.0),
    ("nvjet_other_tile", 6.0),
    ("splitKreduce_kernel", 1.0),
    ("_rms_norm_kernel", 1.0),
    ("nvjet_head", 100.0),
    ("_block_best_kernel", 2.0),
    ("nvjet_tile", 50.0),
    ("_block_best_kernel", 3.0),
]
PERIOD = 300.0
# What each kernel of a replay waits, set up already, for the one before it to end.
WAIT = 0.25


def replays(num: int, *, has_graph_ids: bool = True) -> list[dict[str, Any]]:
    """Steps of 300 us: kernels without a host's parent, with the correlation of their graph's launch, then a copy.

    The first launch was seen in part.
    """
    events = []
    for i in range(num):
        launch = complete("cuda_runtime", "cudaGraphLaunch", PERIOD * i - 50, 20.0, args={"correlation": 1000 + i})
        events.append(launch)
        now = PERIOD * i
        for name, time in REPLAYED:
            args = {"correlation": 1000 + i, "stream": 7} | (
                {"graph id": 3, "graph node id": 5} if has_graph_ids else {}
            )
            event = complete("kernel", name, now - WAIT, time + WAIT, tid=7, args=args)
            now += time
            if i or name not in ("graph_preparation_a", "graph_preparation_b", "_rms_norm_kernel"):
                events.append(event)
        copy = {"correlation": 5000 + i, "stream": 7}
        events.append(complete("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", now + 10, 5.0, tid=7, args=copy))
    return events


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("has_graph_ids", [True, False])
def test_each_kernel_goes_where_its_place_in_the_step_says(tmp_path: Path, has_graph_ids: bool) -> None:
    labelled = write(tmp_path / "labelled.json", labelled_steps(5))
    replayed = write(tmp_path / "replays.json", replays(7, has_graph_ids=has_graph_ids))
    cost = Cost((Op("target", "head", 8e6, 0), Op("draft", "head", 8e6, 0), Op("target", "attention products", 4e3, 0)))
    table = kernel_table(replayed, labelled, 4, 512, 1, cost, untraced=280e-6)
    assert table.steps == 5, "without the first, which was seen in part, and the last, behind which none begins"
    found = {(kind.part, kind.name): kind for kind in table.kinds}
    times = {kind: round(1e6 * row.seconds, 3) for kind, row in found.items()}
    # own times: what a kernel waited for the one before it is not its own; only a step's first waits for none
    assert times == {
        ("target", "head"): 100.0,
        ("draft", "head"): 50.0,
        ("target", "attention"): 20.0,
        ("target", "attention products"): 10 + 4 + 4 + 6 + 1,
        ("", "between steps"): 5.0,
        ("draft", "other"): 3.0,
        ("sampling", "other"): 2.0,
        ("target", "other"): 2 + 0.25 + 2 + 1 + 3 + 1,
    }
    assert table.seconds == pytest.approx(sum(times.values()) / 1e6)
    assert table.period == pytest.approx(PERIOD / 1e6)
    assert table.idle_share == pytest.approx(1 - sum(times.values()) / PERIOD)
    products = {kernel.name: kernel for kernel in found["target", "attention products"].kernels}
    assert {name: (round(k.launches, 6), round(k.num_bytes, 3)) for name, k in products.items()} == {
        "nvjet_tile": (1, 3000),
        "bmm_kernel": (2, 0),
        "nvjet_other_tile": (1, 1000),
        "splitKreduce_kernel": (1, 0),
    }
    written: Any = table.as_dict(Ceilings(1e12, 1e15))
    assert written["kinds"][0]["floor_ms"] == pytest.approx(0.008)
    assert written["kinds"][0]["floor_share"] == pytest.approx(0.08)
    assert written["untraced_ms"] == pytest.approx(0.28)
    kernel = next(k for kind in written["kinds"] for k in kind["kernels"] if k["name"] == "nvjet_other_tile")
    assert (kernel["bytes"], kernel["floor_ms"]) == (1000, pytest.approx(1e-6, abs=1e-5))


def test_work_without_a_kernel_and_a_trace_without_graphs(tmp_path: Path) -> None:
    labelled = write(tmp_path / "labelled.json", labelled_steps(3))
    table = kernel_table(
        write(tmp_path / "replays.json", replays(5)), labelled, 4, 512, 1, Cost((Op("target", "mlp", 1e6, 0),))
    )
    assert [(kind.name, kind.kernels) for kind in table.kinds if kind.cost] == [("mlp", [])], "to be seen, not lost"
    with pytest.raises(EngineError, match="the trace of 4 rows shows no graph launches"):
        kernel_table(labelled, labelled, 4, 512, 1, None)


def test_tables_as_text_and_markdown(tmp_path: Path) -> None:
    labelled = write(tmp_path / "labelled.json", labelled_steps(3))
    cost = Cost((Op("target", "head", 8e6, 0), Op("target", "attention products", 4e6, 8e9)))
    table = kernel_table(write(tmp_path / "replays.json", replays(5)), labelled, 4, 512, 1, cost, untraced=280e-6)
    ceilings = Ceilings(1e12, 1e15)
    text = markdown("a/config.json", [table], ceilings, top=2)
    lines = text.splitlines()
    assert lines[0] == "a/config.json; this machine: copies 1,000 GB/s, multiplies 1,000.00 TFLOP/s."
    assert lines[2] == (
        "**4 rows of 512 tokens, K = 1**: 0.30 ms a step in the trace, 0.21 of them busy (idle 28.6%); 0.28 ms without"
        " a profiler; floor 0.02 ms (6%)."
    )
    assert "| target | **head** | 1 | 100.0 | 33.3% | 8.0 | 0.0 | 8.0 | 8% |" in lines
    assert "|  | `nvjet_head` | 1 | 100.0 | 33.3% | 8.0 |  | 8.0 | 8% |" in lines
    assert "| target | **attention products** | 5 | 25.0 | 8.3% | 4.0 | 8.0 | 8.0 | 32% |" in lines
    assert "|  | `nvjet_tile` | 1 | 10.0 | 3.3% | 0.0 |  | 6.0 | 60% |" in lines, (
        "its weights' part of the kind's floor"
    )
    assert "|  | `2 more` | 2 | 7.0 | 2.3% |  |  |  |  |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {10}
    console = rich.console.Console(width=200, file=io.StringIO())
    console.print(kernel_view(table, ceilings, 2))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4 rows of 512 tokens, K = 1" in shown and "mla_split_kernel" in shown


def test_kinds() -> None:
    def at(part: str, *modules: tuple[str, str]) -> Launch:
        return Launch(part, (("0", "DecoderLayer"), *modules))

    attention, moe = ("self_attn", "MLAAttention"), ("mlp", "MoE")
    assert kind_of(at("target", attention), "gemm_bf16") == ("target", "attention products")
    assert kind_of(at("target", attention), "_mla_inputs_kernel") == ("target", "other")
    assert kind_of(at("target", attention), "mla_join_kernel") == ("target", "attention")
    assert kind_of(at("target", ("self_attn", "GQAAttention")), "gqa_kernel") == ("target", "attention")
    assert kind_of(at("draft", moe), "_grouped_kernel") == ("draft", "experts")
    assert kind_of(at("draft", moe, ("shared", "MLP"), ("down_proj", "Linear")), "x") == ("draft", "experts")
    assert kind_of(at("target", ("mlp", "MLP"), ("down_proj", "Linear")), "x") == ("target", "mlp")
    assert kind_of(at("draft", ("eh_proj", "Linear")), "x") == ("draft", "eh_proj")
    assert kind_of(at("draft", ("eh_proj", "Float8Linear"), ("wide", "Linear")), "x") == ("draft", "eh_proj")
    for head in (
        [("0", "Head")],
        [("1", "Float8Linear")],
        [("1", "Float8Linear"), ("wide", "Head")],
        [("0", "CutHead"), ("lowest", "Float8Linear")],
        [("0", "CutHead")],
    ):
        assert kind_of(at("draft", *head), "x") == ("draft", "head")
    assert kind_of(None, "x") == ("", "other")


def test_a_launch_that_the_profiler_did_not_see_is_where_its_neighbours_are(tmp_path: Path) -> None:
    launches = read_launches(write(tmp_path / "t.json", labelled_steps(3)))
    assert len(launches) == 15, "one step, the middle one"
    names = [name for name, _ in launches]
    assert names[0] == "eager_preparation" and launches[0][1] == Launch("", ())
    unseen = launches[names.index("nvjet_head") - 1]
    assert unseen == ("_rms_norm_kernel", Launch("target", ()))


def test_kernels_in_equal_gaps_are_the_same_work() -> None:
    a, b, c = (Launch("target", ((name, "Linear"),), 8) for name in "abc")
    labelled = [("x", a), ("tile_1", b), ("y", c)]
    assert place(["x", "tile_2", "y"], labelled) == [a, b, c]
    assert place(["x", "tile_2", "tile_3", "y"], labelled) == [a, Launch("target", ()), Launch("target", ()), c]
    assert place(["x"], []) == [None]


def test_a_trace_without_steps_or_device_labels_nothing(tmp_path: Path) -> None:
    assert read_launches(write(tmp_path / "t.json", [])) == []
    steps = [event for event in labelled_steps(3) if event["cat"] == "user_annotation"]
    assert read_launches(write(tmp_path / "t.json", steps)) == []
