"""Published models in their full size, by the keys that decide: each is read, and has its model card's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.job.inspection import inspect_model

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
MLA = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
}
V3 = MLA | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
V2 = MLA | {
    "model_type": "deepseek_v2",
    "max_position_embeddings": 163840,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
SMALL = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
}
GQA = {"hidden_act": "silu", "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False}
GLM = GQA | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "vocab_size": 151552,
}
# Name -> configuration, billions of parameters of the target, of the draft layers, and that a token uses.
PUBLISHED: dict[str, tuple[dict[str, Any], float, float, float]] = {
    "DeepSeek-V3.1": (
        V3
        | {
            "first_k_dense_replace": 3,
            "n_group": 8,
            "n_routed_experts": 256,
            "num_nextn_predict_layers": 1,
            "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "vocab_size": 129280,
        },
        671,
        11.6,
        37,
    ),
    "Kimi-K2": (
        V3
        | {
            "model_type": "kimi_k2",
            "max_position_embeddings": 131072,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "quantization_config": FP8,
            "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
        },
        1026,
        0,
        32.6,
    ),
    "Moonlight-16B-A3B": (
        V3
        | SMALL
        | {
            "intermediate_size": 11264,
            "max_position_embeddings": 8192,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
            "vocab_size": 163840,
        },
        16,
        0,
        2.9,
    ),
    "DeepSeek-V2": (
        V2
        | {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
        236,
        0,
        21.4,
    ),
    "DeepSeek-V2-Lite": (V2 | SMALL | {"intermediate_size": 10944, "topk_method": "greedy"}, 15.7, 0, 2.66),
    "GLM-4.6": (
        GLM
        | {
            "first_k_dense_replace": 3,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_hidden_layers": 92,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        353,
        4,
        33.6,
    ),
    "GLM-4.5-Air": (
        GLM
        | {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_hidden_layers": 46,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        107,
        2.4,
        13.4,
    ),
    "GLM-4.7-Flash": (
        MLA
        | {
            "model_type": "glm4_moe_lite",
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_attention_heads": 20,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
        30,
        0.64,
        3.9,
    ),
    "MiMo-7B": (
        GQA
        | {
            "model_type": "mimo",
            "attention_bias": True,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151680,
        },
        7.62,
        0.21,
        7.62,
    ),
    "Qwen3-30B-A3B": (
        GQA
        | {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        30.5,
        0,
        3.3,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_parameters_of_its_model_card(tmp_path: Path, name: str) -> None:
    config, target, draft, active = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_model(tmp_path, None, torch.bfloat16, torch.device("cpu"), self_test=False)
    counts = (found.parameters, found.draft_parameters, found.active_parameters)
    assert counts == pytest.approx([target * 1e9, draft * 1e9, active * 1e9], rel=0.02)
    assert found.model_type == config["model_type"]
