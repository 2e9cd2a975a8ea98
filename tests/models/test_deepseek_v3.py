"""Law 3, target: logits equal transformers' on the same weights, in float32 on the CPU.

Both sum in float32 in other orders (ours multiplies the latent where transformers expands it): measured differences are
at most 5e-6 of the largest logit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Row
from tiny import CONFIG, random_weights, write_checkpoint
from transformers import DeepseekV3Config as OracleConfig
from transformers import DeepseekV3ForCausalLM as Oracle
from whole_sequence import whole_sequence_logits

from specgen.errors import ModelError
from specgen.model_path import resolve_model
from specgen.models.config import parse_config, read_config
from specgen.models.loading import load_model

TOLERANCE = 2e-5  # of the largest logit
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# As Moonlight and Kimi-K2 are published, with keys that decide nothing here.
PLAIN_GROUPS: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "pretraining_tp": 1,
    "seq_aux": True,
}
KIMI_YARN = {"type": "yarn", "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
KIMI_YARN["original_max_position_embeddings"] = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "q_lora": {},
    "no_q_lora": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN},
    "one_group_no_norm": {"n_group": 1, "norm_topk_prob": False},
    "many_experts": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "two_shared_experts": {"n_shared_experts": 2},
    "all_dense": {"first_k_dense_replace": 2},
    "moonlight": {**PLAIN_GROUPS, "q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-5},
    "kimi_k2": {**PLAIN_GROUPS, "model_type": "kimi_k2", "rope_scaling": KIMI_YARN},
}


def oracle_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    # transformers knows Kimi-K2's name for the same architecture by the repository's own code alone
    config = OracleConfig.from_dict(json.loads((folder / "config.json").read_text()) | {"model_type": "deepseek_v3"})
    oracle = Oracle.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0]


def assert_logits_equal(folder: Path, ids: list[int]) -> None:
    config = read_config(folder)
    target = load_model(folder, config, 0, len(ids), torch.float32, torch.device("cpu")).target
    want = oracle_logits(folder, ids)
    assert (whole_sequence_logits(target, ids) - want).abs().max() < TOLERANCE * want.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_equal_transformers(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    ids = torch.randint(0, 64, (97,), generator=torch.Generator().manual_seed(3)).tolist()
    assert_logits_equal(folder, ids)


def test_bundled_model_equals_transformers() -> None:
    ids = torch.randint(3, 4096, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    assert_logits_equal(resolve_model("stories-7m"), [0, *ids])


def test_nothing_unwritten_is_read(tmp_path: Path) -> None:
    """U08: a pool full of NaN gives the same tokens as a pool full of zeros."""
    folder = write_checkpoint(tmp_path)
    rows = [Row([5, 6, 7, 8, 9] * n, seed=n) for n in (1, 3, 8)]
    results = []
    for value in (0.0, float("nan")):
        harness = Harness(folder, k=3, budget=16)
        harness.worker.kv_caches.fill_(value)
        results.append([r.token_ids for r in harness.run(rows)])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "has no model_type"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(CONFIG | change, "config.json")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ModelError, match="kv_lora_rank"):
        parse_config({k: v for k, v in CONFIG.items() if k != "kv_lora_rank"}, "config.json")


class TestWeights:
    """A folder that is not what its configuration says is refused with file and tensor."""

    def load(self, folder: Path, k: int = 0) -> None:
        load_model(folder, read_config(folder), k, 64, torch.float32, torch.device("cpu"))

    def test_missing_tensor(self, tmp_path: Path) -> None:
        weights = random_weights(CONFIG)
        del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
        with pytest.raises(ModelError, match=r"experts\.2\.up_proj"):
            self.load(write_checkpoint(tmp_path, weights))

    def test_unexpected_tensor(self, tmp_path: Path) -> None:
        weights = random_weights(CONFIG) | {"model.layers.0.self_attn.q_a_proj.bias": torch.zeros(24)}
        with pytest.raises(ModelError, match=r"q_a_proj\.bias"):
            self.load(write_checkpoint(tmp_path, weights))

    def test_wrong_shape(self, tmp_path: Path) -> None:
        weights = random_weights(CONFIG) | {"lm_head.weight": torch.zeros(63, 48)}
        with pytest.raises(ModelError, match=r"lm_head.*\[63, 48\].*\[64, 48\]"):
            self.load(write_checkpoint(tmp_path, weights))

    def test_truncated_file(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ModelError, match="damaged or truncated"):
            self.load(folder)

    def test_index_names_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "part-2.safetensors"}}')
        with pytest.raises(ModelError, match="part-2"):
            self.load(folder)

    def test_promised_draft_layer_is_not_there(self, tmp_path: Path) -> None:
        weights = {k: v for k, v in random_weights(CONFIG).items() if not k.startswith("model.layers.2.")}
        folder = write_checkpoint(tmp_path, weights)
        self.load(folder)
        with pytest.raises(ModelError, match=r"model\.layers\.2\."):
            self.load(folder, k=3)

    def test_model_without_draft_layers(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, num_nextn_predict_layers=0)
        with pytest.raises(ModelError, match="no draft layer"):
            self.load(folder, k=1)
