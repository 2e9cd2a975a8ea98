"""The drafter's first pass: what it leaves out of the last layer is what nobody reads.

Compared with a pass that computes every layer over all tokens: the drafts' logits, the drafts and the draft layers' KV
after every step, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import tiny_dense
import torch
from harness import Harness, Restless, Row

from specgen.model_path import resolve_model
from specgen.models.context import AttentionContext, OutputRows
from specgen.sampling_params import SamplingParams
from specgen.worker.input_batch import InputBatch


class Proposed(NamedTuple):
    """A step's proposal: logits `[B, V]` of each draft, rows that sampled nothing apart; drafts and KV as it left them.

    tokens, rows and num_drafts: of the step. seen: rows that the last layer's feed-forward was given, call by call.
    num_preemptions: up to here.
    """

    logits: list[torch.Tensor]
    drafts: torch.Tensor
    kv: torch.Tensor
    tokens: int
    rows: int
    num_drafts: int
    seen: list[int]
    num_preemptions: int


def proposals(folder: Path, rows: list[Row], whole: bool, **options: Any) -> list[Proposed]:
    """What the drafter proposes, step by step; `whole`: every layer runs over all tokens."""
    harness = Harness(folder, **options)
    worker = harness.worker
    mtp, drafter, kv = worker.model.mtp, worker.runner.drafter, worker.kv_caches
    assert isinstance(mtp, torch.nn.Module) and drafter is not None
    kv.zero_()
    forward, compute_logits, propose = mtp.forward, mtp.compute_logits, drafter.propose
    logits: list[torch.Tensor] = []
    seen: list[int] = []
    steps: list[Proposed] = []

    def run_whole(
        layer: int,
        input_ids: torch.Tensor,
        previous: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        hidden: torch.Tensor = forward(layer, input_ids, previous, context, kv_cache)
        return hidden if outputs is None else hidden[outputs.rows]

    def record_logits(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute_logits(layer, hidden))
        return logits[-1].clone()  # the sampler works in place

    def record(batch: InputBatch, hidden: Any, num_sampled: torch.Tensor, num_rejected: Any, num_drafts: int) -> None:
        logits.clear()
        seen.clear()
        propose(batch, hidden, num_sampled, num_rejected, num_drafts)
        samples = num_sampled > 0
        num_tokens, num_rows = len(batch.input_ids), len(num_sampled)
        left = worker.states.draft_tokens[:-1].clone(), kv[-mtp.num_layers :].clone()
        counts = num_tokens, num_rows, num_drafts, list(seen), harness.scheduler.num_preemptions
        steps.append(Proposed([x[samples] for x in logits], *left, *counts))

    mtp.layers[-1].mtp_block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    if whole:
        mtp.forward = run_whole
    mtp.compute_logits, drafter.propose = record_logits, record  # type: ignore[method-assign]
    harness.run(rows)
    return steps


def ragged(vocab_size: int, num: int, max_tokens: int, lengths: tuple[int, ...]) -> list[Row]:
    """Prompts of these lengths in turn, greedy and random rows."""
    rng = random.Random(num)
    return [
        Row(
            [rng.randrange(vocab_size) for _ in range(lengths[i % len(lengths)])],
            SamplingParams(temperature=0.8 * (i % 2), max_tokens=max_tokens, ignore_eos=True),
            seed=i,
        )
        for i in range(num)
    ]


def write(folder: Path, family: str, num_layers: int) -> Path:
    """A tiny model with so many draft layers; "latent" has a query latent, "no latent" has none."""
    if family in tiny_dense.CONFIGS:
        return tiny_dense.write_folder(folder, tiny_dense.config_of(family, num_nextn_predict_layers=num_layers))
    q_lora_rank = None if family == "no latent" else tiny.CONFIG["q_lora_rank"]
    return tiny.write_checkpoint(folder, num_nextn_predict_layers=num_layers, q_lora_rank=q_lora_rank)


CHUNKED = {"budget": 9, "max_num_seqs": 4}
# 6 rows of up to 26 tokens and 12 more each, and room for 60: some are sent back
CROWDED = {"num_blocks": 16, "max_num_seqs": 6, "prefix_caching": False}


@pytest.mark.parametrize("restless", [False, True])
@pytest.mark.parametrize(
    ("family", "num_layers", "k", "options"),
    [
        ("latent", 1, 3, CHUNKED),
        ("latent", 1, 3, CROWDED),
        ("latent", 2, 2, CHUNKED),  # the last layer's first pass is read by nobody
        ("latent", 2, 4, CHUNKED | {"async_scheduling": True}),
        ("no latent", 1, 2, CHUNKED | {"kv_dtype": torch.float8_e4m3fn}),
        ("mimo", 1, 3, CHUNKED),
        ("mimo", 2, 4, CROWDED),
        ("mimo", 2, 1, CHUNKED | {"async_scheduling": True}),
        ("glm4_moe", 1, 2, CHUNKED),
    ],
)
def test_drafts_and_kv_are_those_of_the_whole_pass(
    tmp_path: Path, family: str, num_layers: int, k: int, options: dict[str, Any], restless: bool
) -> None:
    """Chunks of prompts, preempted rows, and between others steps that make no drafts."""
    folder = write(tmp_path, family, num_layers)
    rows = ragged(64, 6, 12, (1, 9, 26, 3, 14, 5))

    def run(whole: bool) -> list[Proposed]:
        draft_length = Restless(k, random.Random(5)) if restless else None
        return proposals(folder, rows, whole, k=k, draft_length=draft_length, **options)

    some = run(False)
    assert_same(some, run(True))
    if options is CROWDED:
        assert some[-1].num_preemptions > 0
    if restless:
        assert any(step.num_drafts == 0 for step in some[5:-5])


def test_the_bundled_models_drafts_and_kv_are_those_of_the_whole_pass() -> None:
    rows = ragged(4096, 5, 16, (37, 80, 3, 1, 50))
    options: dict[str, Any] = {"k": 3, "budget": 48, "max_model_len": 128}
    some, whole = (proposals(resolve_model("stories-7m"), rows, w, **options) for w in (False, True))
    assert_same(some, whole)


def assert_same(some: list[Proposed], whole: list[Proposed]) -> None:
    assert len(some) == len(whole) > 5
    for i, (ours, theirs) in enumerate(zip(some, whole, strict=True)):
        assert torch.equal(ours.drafts, theirs.drafts), i
        assert torch.equal(ours.kv.view(torch.uint8), theirs.kv.view(torch.uint8)), i
        assert len(ours.logits) == len(theirs.logits) == ours.num_drafts
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            assert torch.equal(a, b), i


@pytest.mark.parametrize("family", ["latent", "mimo"])
def test_the_last_layers_feed_forward_sees_rows_and_not_tokens(tmp_path: Path, family: str) -> None:
    """B rows in the first pass as in every later one, and none where its output is not read."""
    rows = ragged(64, 6, 12, (30, 9, 26))

    def run(num_layers: int, whole: bool) -> list[Proposed]:
        folder = write(tmp_path / str(num_layers), family, num_layers)
        lengths = Restless(3, random.Random(1))
        return proposals(folder, rows, whole, k=3, budget=24, max_num_seqs=4, draft_length=lengths)

    one, two = run(1, False), run(2, False)
    assert any(step.tokens > 2 * step.rows for step in one)
    assert {step.num_drafts for step in one} == {step.num_drafts for step in two} == {0, 1, 2, 3}
    assert all(step.seen == [step.rows] * step.num_drafts for step in one)
    # of two layers the upper one: a third draft begins with its output, the second is its own pass over a token a row
    assert all(step.seen == [step.rows] * max(0, step.num_drafts - 1) for step in two)
    assert all(step.seen[0] == step.tokens for step in run(1, True))
