"""The dense families and their draft layers in plain torch: whole sequences, nothing cached, nothing fused.

An oracle for the engine's models, written from the papers and the checkpoints' tensor names, one head and one expert
at a time. The chain of drafts is `PlainDeepseek`'s; everything within a layer is written anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from plain_deepseek import PlainDeepseek, Weights, norm


def rotate_halves(x: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
    """x [S, D]: elements (i, i + R/2) of position s turn by s * theta^(-2i/R), for i < R/2; the rest stays."""
    half = rotary_dim // 2
    angle = torch.arange(x.shape[0]).double()[:, None] * theta ** (-torch.arange(half).double() * 2 / rotary_dim)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[:, :half], x[:, half:rotary_dim]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[:, rotary_dim:]], -1)


class PlainDense(PlainDeepseek):
    """Weights by their checkpoint names; `config` is the parsed config.json; plain RoPE; MiMo's or GLM-4's head.

    `head` gives the draft layers' weights and configuration where they come from another folder.
    """

    def __init__(
        self,
        weights: Weights,
        config: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
        head: tuple[Weights, Mapping[str, Any]] | None = None,
    ) -> None:
        head_weights, head_config = head or ({}, config)
        super().__init__({**weights, **head_weights}, config, dtype)
        self.c = {**config, "num_nextn_predict_layers": head_config.get("num_nextn_predict_layers", 0)}
        self.is_mimo = head is not None or config["model_type"] == "mimo"
        self.head_config = head_config
        declared = head_config.get("mtp", {})
        self.hidden_first = self.is_mimo and declared.get("input_proj_order", ["hidden"])[0].startswith("hidden")
        self.masks = declared.get("zero_embedding_at_position_0", True)
        self.reads_normed = not self.is_mimo or "after" in declared.get("hidden_from_target", "before")
        if config.get("tie_word_embeddings"):
            self.w["lm_head.weight"] = self.w["model.embed_tokens.weight"]

    def heads(self, p: str, name: str, x: torch.Tensor, num: int) -> list[torch.Tensor]:
        rows = x @ self.w[f"{p}{name}_proj.weight"].T + self.w.get(f"{p}{name}_proj.bias", 0)
        parts = list(rows.chunk(num, -1))
        weight = self.w.get(f"{p}{name}_norm.weight")
        return parts if weight is None else [norm(part, weight, self.eps) for part in parts]

    def attention(self, p: str, x: torch.Tensor, first_key: int) -> torch.Tensor:
        c = self.head_config if "mtp_layers" in p else self.c
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        q, k, v = (self.heads(p, name, x, num) for name, num in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        dim = q[0].shape[1]
        turned = int(dim * c.get("partial_rotary_factor", 1.0))
        position = torch.arange(x.shape[0])
        visible = (position[None, :] <= position[:, None]) & (position[None, :] >= first_key)
        outputs = []
        for h in range(heads):
            source = h // (heads // kv_heads)
            a, b = (rotate_halves(t, c["rope_theta"], turned) for t in (q[h], k[source]))
            scores = (a @ b.T * dim**-0.5).masked_fill(~visible, float("-inf"))
            outputs.append(scores.softmax(-1).nan_to_num(0.0) @ v[source])
        return torch.cat(outputs, -1) @ self.w[p + "o_proj.weight"].T + self.w.get(p + "o_proj.bias", 0)

    def feed_forward(self, p: str, x: torch.Tensor) -> torch.Tensor:
        c, w = self.c, self.w
        if p + "gate.weight" not in w:
            return self.mlp(p, x)
        logits, bias = x @ w[p + "gate.weight"].T, w.get(p + "gate.e_score_correction_bias")
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        shared = p + "shared_experts."
        out = self.mlp(shared, x) if shared + "up_proj.weight" in w else torch.zeros_like(x)
        for i in range(x.shape[0]):
            choice = scores[i] if bias is None else scores[i] + bias
            experts = sorted(range(len(choice)), key=lambda e: -float(choice[e]))[: c["num_experts_per_tok"]]
            total = sum(scores[i, e] for e in experts) if c["norm_topk_prob"] else 1.0
            for e in experts:
                weight = scores[i, e] / total * c.get("routed_scaling_factor", 1.0)
                out[i] = out[i] + weight * self.mlp(f"{p}experts.{e}.", x[i : i + 1])[0]
        return out

    def block(self, p: str, x: torch.Tensor, first_key: int = 0) -> torch.Tensor:
        x = x + self.attention(p + "self_attn.", norm(x, self.w[p + "input_layernorm.weight"], self.eps), first_key)
        return x + self.feed_forward(p + "mlp.", norm(x, self.w[p + "post_attention_layernorm.weight"], self.eps))

    def stream(self, ids: torch.Tensor) -> torch.Tensor:
        """[S] -> the residual stream behind the last layer [S, H]."""
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.c["num_hidden_layers"]):
            x = self.block(f"model.layers.{i}.", x)
        return x

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[S] -> the hidden states that the draft layers read [S, H]."""
        x = self.stream(ids)
        return norm(x, self.w["model.norm.weight"], self.eps) if self.reads_normed else x

    def target_logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(norm(self.stream(ids), self.w["model.norm.weight"], self.eps))

    def mtp(self, j: int, previous: torch.Tensor, next_ids: torch.Tensor, mask_first: bool = True) -> torch.Tensor:
        """Draft layer j over a whole sequence: row s reads hidden `previous[s]` and token `next_ids[s]` (of s + 1)."""
        w = self.w
        if self.is_mimo:
            p, names = (
                f"model.mtp_layers.{j}.",
                ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            )
        else:
            p, names = (
                f"model.layers.{self.c['num_hidden_layers'] + j}.",
                ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
            )
        of_token, of_hidden, projection, last = (w[f"{p}{name}.weight"] for name in names)
        embedding = w["model.embed_tokens.weight"][next_ids].clone()
        if mask_first and self.masks:
            embedding[0] = 0
        parts = [norm(embedding, of_token, self.eps), norm(previous, of_hidden, self.eps)]
        x = torch.cat(parts[::-1] if self.hidden_first else parts, -1) @ projection.T
        return norm(self.block(p, x, first_key=j), last, self.eps)

    def mtp_logits(self, j: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden)
