"""Draft logits as the engine computes them, chain by chain, and their comparison with a plain model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import Harness, Row
from plain_deepseek import PlainDeepseek

# The oracle computes in float64. Random weights amplify rounding along a chain: a plain float32 computation of the same
# is off by up to 2.8e-4, the engine by up to 1.7e-4 (tiny models), on logits of size 5.
TOLERANCE = 5e-4


class Recorder:
    """Draft logits as the engine computed them, with the committed tokens that they continue."""

    def __init__(self, harness: Harness) -> None:
        self.records: list[tuple[list[int], list[torch.Tensor]]] = []
        drafter = harness.worker.runner.drafter
        mtp, states = harness.worker.model.mtp, harness.worker.states
        assert mtp is not None
        inner_logits, inner_propose = mtp.compute_logits, drafter.propose
        steps: list[torch.Tensor] = []

        def compute_logits(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            logits = inner_logits(layer, hidden)
            steps.append(logits.clone())
            return logits

        def propose(batch: Any, hidden: Any, num_sampled: Any, num_rejected: Any, num_spec: int) -> None:
            steps.clear()
            inner_propose(batch, hidden, num_sampled, num_rejected, num_spec)
            usable = {request.slot: request.num_lookahead_slots for request in harness.scheduler.running}
            for i, slot in enumerate(batch.idx_mapping.tolist()):
                ids = states.token_ids[slot, : int(states.total_len[slot])].tolist()
                if int(num_sampled[i]):
                    self.records.append((ids, [logits[i] for logits in steps[: usable[slot]]]))

        mtp.compute_logits = compute_logits
        drafter.propose = propose


def record(folder: Path, rows: list[Row], k: int, **options: Any) -> list[tuple[list[int], list[torch.Tensor]]]:
    harness = Harness(folder, k=k, **options)
    recorder = Recorder(harness)
    harness.run(rows)
    return recorder.records


def assert_chains_equal(
    oracle: PlainDeepseek, records: list[tuple[list[int], list[torch.Tensor]]], every: int = 1
) -> int:
    """Every recorded chain against the oracle; returns the number of draft logits compared."""
    compared = 0
    for ids, logits in records[::every]:
        chosen, want = oracle.drafts(ids, len(logits))
        for step, (ours, theirs) in enumerate(zip(logits, want, strict=True)):
            assert (ours - theirs).abs().max() < TOLERANCE, (len(ids), step)
            compared += 1
            if int(ours.argmax()) != chosen[step]:
                break  # a near tie: the chains part
    return compared
