"""The kernel table from two traces that are written here: one of graph replays, one of labelled steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.job.floor import Ceilings, Cost, Op
from specgen.job.kernels import Launch, kernel_table, kind_of, read_launches


def complete(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, **more}


class Labelled:
    """Writes a labelled step: ranges and launches on the host, kernels on the device somewhat later."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0.0
        self.correlation = 0

    def open(self, name: str) -> dict[str, Any]:
        event = complete("user_annotation", name, self.now, 0.0)
        self.events.append(event)
        self.now += 1
        return event

    def close(self, event: dict[str, Any]) -> None:
        event["dur"] = self.now - event["ts"]
        self.now += 1

    def launch(self, kernel: str) -> None:
        self.correlation += 1
        args = {"correlation": self.correlation}
        self.events.append(complete("cuda_runtime", "cudaLaunchKernel", self.now, 0.5, args=args))
        self.events.append(complete("kernel", kernel, self.now + 1000, 5.0, tid=7, args=args))
        self.now += 1


def labelled_steps(num: int) -> list[dict[str, Any]]:
    """Each step: a norm, a projection and attention in the target; the head twice, the second time for a draft."""
    t = Labelled()
    for i in range(num):
        step = t.open(f"ProfilerStep#{i}")
        part = t.open("part:target")
        layer = t.open("module:0:DecoderLayer")
        norm = t.open("module:input_layernorm:RMSNorm")
        t.launch("_rms_norm_kernel")
        t.close(norm)
        attention = t.open("module:self_attn:MLAAttention")
        product = t.open("module:o_proj:Linear")
        t.launch("nvjet_tile")
        t.close(product)
        t.launch("_mla_split_kernel")
        t.close(attention)
        t.close(layer)
        t.close(part)
        for part_name in ("sampling", "draft"):
            part = t.open(f"part:{part_name}")
            head = t.open("module:lm_head:Head")
            t.launch("nvjet_tile")
            t.close(head)
            t.launch("_block_best_kernel")
            t.close(part)
        t.close(step)
    return t.events


def replays(num: int) -> list[dict[str, Any]]:
    names = ["_rms_norm_kernel", "nvjet_tile", "_mla_split_kernel", *["nvjet_tile", "_block_best_kernel"] * 2, "memcpy"]
    times = [1.0, 10.0, 20.0, 100.0, 2.0, 50.0, 3.0, 4.0]
    return [
        complete("kernel", name, 1000 * i + 110 * j, time, args={"correlation": i, "graph id": 3})
        for i in range(num)
        for j, (name, time) in enumerate(zip(names, times, strict=True))
    ]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_each_launch_of_a_name_goes_where_its_step_says(tmp_path: Path) -> None:
    labelled = write(tmp_path / "labelled.json", labelled_steps(5))
    replayed = write(tmp_path / "replays.json", replays(7))
    cost = Cost((Op("target", "head", 8e6, 0), Op("draft", "head", 8e6, 0), Op("target", "attention", 1e6, 0)))
    table = kernel_table(replayed, labelled, 4, 1, cost)
    assert table.steps == 5
    found = {(kind.part, kind.name): kind for kind in table.kinds}
    times = {kind: round(1e6 * row.seconds, 3) for kind, row in found.items()}
    assert times == {
        ("target", "head"): 100.0,
        ("draft", "head"): 50.0,
        ("target", "attention"): 20.0,
        ("target", "attention products"): 10.0,
        ("", "other"): 4.0,
        ("draft", "other"): 3.0,
        ("sampling", "other"): 2.0,
        ("target", "other"): 1.0,
    }
    assert [kind.name for kind in table.kinds][:2] == ["head", "head"]
    assert table.seconds == pytest.approx(190e-6)
    assert found["draft", "head"].kernels[0].launches == pytest.approx(1.0)
    assert found["target", "attention products"].cost is None
    written = table.as_dict(Ceilings(1e12, 1e15))
    assert written["kinds"][0]["floor_ms"] == pytest.approx(0.008)  # type: ignore[index]


def test_kinds() -> None:
    def place(part: str, *modules: tuple[str, str]) -> Launch:
        return Launch(part, (("0", "DecoderLayer"), *modules))

    attention, moe = ("self_attn", "MLAAttention"), ("mlp", "MoE")
    assert kind_of(place("target", attention), "gemm_bf16") == ("target", "attention products")
    assert kind_of(place("target", attention), "_mla_inputs_kernel") == ("target", "other")
    assert kind_of(place("target", attention), "mla_join_kernel") == ("target", "attention")
    assert kind_of(place("target", ("self_attn", "GQAAttention")), "_gqa_kernel") == ("target", "attention")
    assert kind_of(place("draft", moe), "_grouped_kernel") == ("draft", "experts")
    assert kind_of(place("draft", moe, ("shared", "MLP"), ("down_proj", "Linear")), "x") == ("draft", "experts")
    assert kind_of(place("target", ("mlp", "MLP"), ("down_proj", "Linear")), "x") == ("target", "mlp")
    assert kind_of(place("draft", ("eh_proj", "Linear")), "x") == ("draft", "eh_proj")
    assert kind_of(place("draft", ("eh_proj", "Float8Linear"), ("wide", "Linear")), "x") == ("draft", "eh_proj")
    for head in (
        [("0", "Head")],
        [("1", "Float8Linear")],
        [("1", "Float8Linear"), ("wide", "Head")],
        [("0", "CutHead"), ("lowest", "Float8Linear")],
        [("0", "CutHead")],
    ):
        assert kind_of(place("draft", *head), "x") == ("draft", "head")
    assert kind_of(None, "x") == ("", "other")


def test_a_trace_without_steps_or_device_labels_nothing(tmp_path: Path) -> None:
    assert read_launches(write(tmp_path / "t.json", [])) == {}
    steps = [event for event in labelled_steps(3) if event["cat"] == "user_annotation"]
    assert read_launches(write(tmp_path / "t.json", steps)) == {}
