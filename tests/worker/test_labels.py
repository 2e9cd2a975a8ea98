"""Labelled steps: ranges named after modules and parts, and nothing left behind."""

import json
from pathlib import Path

from harness import Harness, Row
from tiny import write_checkpoint

from specgen.sampling_params import SamplingParams
from specgen.worker.labels import StepLabels
from specgen.worker.trace import StepTrace


def test_a_labelled_step_shows_parts_and_modules_and_the_same_tokens(tmp_path: Path) -> None:
    rows = [Row([1, 2, 3 + i], SamplingParams(max_tokens=40, temperature=0.0)) for i in range(2)]
    harness = Harness(write_checkpoint(tmp_path), k=1)
    plain = harness.run(rows)
    runner, model = harness.worker.runner, harness.worker.model
    labels = StepLabels(runner, (model.target, model.mtp))
    harness.worker.trace = StepTrace(tmp_path / "t.json", 2, 2)
    labelled = harness.run(rows)
    labels.remove()
    assert [r.token_ids for r in labelled] == [r.token_ids for r in plain]
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"part:target", "part:sampling", "part:draft"} <= names
    # float32: o_proj is 32 -> 48, the head 48 -> 64; what is more than one product has no bytes
    modules = {"module:self_attn:MLAAttention:0", "module:mlp:MoE:0", "module:o_proj:Linear:6144"}
    assert modules | {"module:lm_head:Head:12288"} <= names
    assert runner.timer.on_part is None
    parts = [m for part in (model.target, model.mtp) for m in part.modules()]  # type: ignore[union-attr]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in parts)
