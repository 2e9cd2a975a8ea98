"""Tiny random DeepSeek-V3-layout checkpoints, written in the published tensor names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def random_weights(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights at a scale that makes attention and routing matter and the argmax vary."""
    c, g = config, torch.Generator().manual_seed(seed)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, out: int, num_in: int, gain: float = 1.5) -> None:
        weights[name] = (torch.randn(out, num_in, generator=g) * gain * num_in**-0.5).to(dtype)

    def scale(name: str, size: int) -> None:
        weights[name] = (1 + 0.2 * torch.randn(size, generator=g)).to(dtype)

    def mlp(p: str, inner: int) -> None:
        matrix(p + "gate_proj.weight", inner, hidden)
        matrix(p + "up_proj.weight", inner, hidden)
        matrix(p + "down_proj.weight", hidden, inner)

    def layer(i: int) -> None:
        p = f"model.layers.{i}."
        scale(p + "input_layernorm.weight", hidden)
        scale(p + "post_attention_layernorm.weight", hidden)
        a = p + "self_attn."
        if c["q_lora_rank"]:
            matrix(a + "q_a_proj.weight", c["q_lora_rank"], hidden)
            scale(a + "q_a_layernorm.weight", c["q_lora_rank"])
            matrix(a + "q_b_proj.weight", heads * (nope + rope), c["q_lora_rank"], 3.0)
        else:
            matrix(a + "q_proj.weight", heads * (nope + rope), hidden, 3.0)
        matrix(a + "kv_a_proj_with_mqa.weight", rank + rope, hidden)
        scale(a + "kv_a_layernorm.weight", rank)
        matrix(a + "kv_b_proj.weight", heads * (nope + value), rank)
        matrix(a + "o_proj.weight", hidden, heads * value)
        m = p + "mlp."
        if i < c["first_k_dense_replace"]:
            mlp(m, c["intermediate_size"])
            return
        matrix(m + "gate.weight", c["n_routed_experts"], hidden)
        weights[m + "gate.e_score_correction_bias"] = 0.1 * torch.randn(c["n_routed_experts"], generator=g)
        for e in range(c["n_routed_experts"]):
            mlp(f"{m}experts.{e}.", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            mlp(m + "shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])

    matrix("model.embed_tokens.weight", c["vocab_size"], hidden, hidden**0.5)
    matrix("lm_head.weight", c["vocab_size"], hidden, 2.0)
    scale("model.norm.weight", hidden)
    for i in range(c["num_hidden_layers"]):
        layer(i)
    for j in range(c["num_nextn_predict_layers"]):
        i = c["num_hidden_layers"] + j
        layer(i)
        p = f"model.layers.{i}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            scale(f"{p}{name}.weight", hidden)
        matrix(p + "eh_proj.weight", hidden, 2 * hidden)
    return weights


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A model folder of `CONFIG` with `changes`, random unless `weights` are given."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights if weights is not None else random_weights(config), folder / "model.safetensors")
    return folder
