"""Tiny random checkpoints of the families over the dense decoder, written with published names and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": _SHARED | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 128},
    "qwen3": _SHARED | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False},
    "mimo": _SHARED | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "head_dim": 8},
    "qwen3_moe": _SHARED
    | _MOE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "glm4_moe": _SHARED
    | _MOE
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 1,
    },
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The tiny config.json of a family, with `changes`."""
    return CONFIGS[family] | {"model_type": family} | changes


class _Maker:
    """Random weights at a scale that makes attention and routing matter and the argmax vary."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.c = config
        self.g = torch.Generator().manual_seed(seed)
        self.weights: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, out: int, num_in: int, gain: float = 1.5) -> None:
        self.weights[name] = torch.randn(out, num_in, generator=self.g) * gain * num_in**-0.5

    def vector(self, name: str, size: int, mean: float = 1.0) -> None:
        self.weights[name] = mean + 0.2 * torch.randn(size, generator=self.g)

    def mlp(self, p: str, inner: int) -> None:
        hidden = self.c["hidden_size"]
        self.matrix(p + "gate_proj.weight", inner, hidden)
        self.matrix(p + "up_proj.weight", inner, hidden)
        self.matrix(p + "down_proj.weight", hidden, inner)

    def attention(self, p: str) -> None:
        c, kind = self.c, self.c["model_type"]
        hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or hidden // heads
        has_bias = kind in ("qwen2", "mimo") or c.get("attention_bias", False)
        for name, num in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self.matrix(f"{p}{name}_proj.weight", num * dim, hidden, 1.0 if name == "v" else 2.0)
            if has_bias:
                self.vector(f"{p}{name}_proj.bias", num * dim, 0.0)
        self.matrix(p + "o_proj.weight", hidden, heads * dim)
        if has_bias and kind in ("llama", "qwen3", "qwen3_moe"):
            self.vector(p + "o_proj.bias", hidden, 0.0)
        if kind in ("qwen3", "qwen3_moe") or c.get("use_qk_norm", False):
            self.vector(p + "q_norm.weight", dim)
            self.vector(p + "k_norm.weight", dim)

    def layer(self, p: str, index: int) -> None:
        c = self.c
        self.vector(p + "input_layernorm.weight", c["hidden_size"])
        self.vector(p + "post_attention_layernorm.weight", c["hidden_size"])
        self.attention(p + "self_attn.")
        num_experts = c.get("num_experts") or c.get("n_routed_experts") or 0
        if not num_experts or index < c.get("first_k_dense_replace", 0) or index in c.get("mlp_only_layers", []):
            self.mlp(p + "mlp.", c["intermediate_size"])
            return
        self.matrix(p + "mlp.gate.weight", num_experts, c["hidden_size"])
        if c["model_type"] == "glm4_moe":
            self.vector(p + "mlp.gate.e_score_correction_bias", num_experts, 0.0)
            self.mlp(p + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
        for e in range(num_experts):
            self.mlp(f"{p}mlp.experts.{e}.", c["moe_intermediate_size"])

    def model(self) -> None:
        c, hidden = self.c, self.c["hidden_size"]
        self.matrix("model.embed_tokens.weight", c["vocab_size"], hidden, hidden**0.5)
        if not c["tie_word_embeddings"]:
            self.matrix("lm_head.weight", c["vocab_size"], hidden, 2.0)
        self.vector("model.norm.weight", hidden)
        for i in range(c["num_hidden_layers"]):
            self.layer(f"model.layers.{i}.", i)
        if c["model_type"] == "mimo":
            self.mimo_head()
        elif c["model_type"] == "glm4_moe":
            for i in range(c["num_hidden_layers"], c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
                p = f"model.layers.{i}."
                self.layer(p, i)
                for name in ("enorm", "hnorm", "shared_head.norm"):
                    self.vector(f"{p}{name}.weight", hidden)
                self.matrix(p + "eh_proj.weight", hidden, 2 * hidden)

    def mimo_head(self) -> None:
        hidden = self.c["hidden_size"]
        for i in range(self.c["num_nextn_predict_layers"]):
            p = f"model.mtp_layers.{i}."
            self.layer(p, self.c["num_hidden_layers"] + i)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                self.vector(f"{p}{name}.weight", hidden)
            self.matrix(p + "input_proj.weight", hidden, 2 * hidden)


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a whole checkpoint, draft layers included."""
    maker = _Maker(config, seed)
    maker.model()
    return maker.weights


def random_head(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights of a MiMo-layout head alone."""
    maker = _Maker(config, seed)
    maker.mimo_head()
    return maker.weights


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None, file: str = "model"
) -> Path:
    """A model folder of `config`, random unless `weights` are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights if weights is not None else random_weights(config)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / f"{file}.safetensors")
    return folder
