"""DeepSeek-V3 and its MTP layers in plain torch: whole sequences, nothing cached, nothing fused, one expert at a time.

An oracle for the engine's models, written from the papers (arXiv 2405.04434, 2412.19437) and the checkpoint's tensor
names; too simple to be wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [S, heads, D]: pair (2i, 2i+1) of position s turns by s * theta^(-2i/D)."""
    length, _, dim = x.shape
    angle = torch.arange(length, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x.double().reshape(length, -1, dim // 2, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class PlainDeepseek:
    """Weights by their checkpoint names, in float32 or float64; `config` is the parsed config.json; plain RoPE."""

    def __init__(self, weights: Weights, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.w = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.c = config
        self.eps = config["rms_norm_eps"]

    def attention(self, p: str, x: torch.Tensor, first_key: int) -> torch.Tensor:
        c, w = self.c, self.w
        heads, nope, rope, value = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        rank, length = c["kv_lora_rank"], x.shape[0]
        if c["q_lora_rank"]:
            q = (
                norm(x @ w[p + "q_a_proj.weight"].T, w[p + "q_a_layernorm.weight"], self.eps)
                @ w[p + "q_b_proj.weight"].T
            )
        else:
            q = x @ w[p + "q_proj.weight"].T
        q = q.view(length, heads, nope + rope)
        kv = x @ w[p + "kv_a_proj_with_mqa.weight"].T
        latent = norm(kv[:, :rank], w[p + "kv_a_layernorm.weight"], self.eps)
        k_rope = rotate(kv[:, None, rank:], c["rope_theta"]).expand(length, heads, rope)
        up = (latent @ w[p + "kv_b_proj.weight"].T).view(length, heads, nope + value)
        k = torch.cat([up[..., :nope], k_rope], -1)
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], c["rope_theta"])], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5
        position = torch.arange(length)
        visible = (position[None, :] <= position[:, None]) & (position[None, :] >= first_key)
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", probs, up[..., nope:]).reshape(length, -1) @ w[p + "o_proj.weight"].T

    def mlp(self, p: str, x: torch.Tensor) -> torch.Tensor:
        w = self.w
        gate = x @ w[p + "gate_proj.weight"].T
        return (gate * torch.sigmoid(gate) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T

    def moe(self, p: str, x: torch.Tensor) -> torch.Tensor:
        c, w = self.c, self.w
        scores = torch.sigmoid(x @ w[p + "gate.weight"].T)
        out = self.mlp(p + "shared_experts.", x) if c["n_shared_experts"] else torch.zeros_like(x)
        per_group = c["n_routed_experts"] // c["n_group"]
        for i in range(x.shape[0]):
            choice = scores[i] + w[p + "gate.e_score_correction_bias"]
            groups = [sorted(choice[g * per_group : (g + 1) * per_group].tolist())[-2:] for g in range(c["n_group"])]
            best = sorted(range(c["n_group"]), key=lambda g: -sum(groups[g]))[: c["topk_group"]]
            experts = [e for g in best for e in range(g * per_group, (g + 1) * per_group)]
            experts = sorted(experts, key=lambda e: -float(choice[e]))[: c["num_experts_per_tok"]]
            total = sum(scores[i, e] for e in experts) + 1e-20 if c["norm_topk_prob"] else 1.0
            for e in experts:
                weight = scores[i, e] / total * c["routed_scaling_factor"]
                out[i] = out[i] + weight * self.mlp(f"{p}experts.{e}.", x[i : i + 1])[0]
        return out

    def layer(self, index: int, x: torch.Tensor, first_key: int = 0) -> torch.Tensor:
        p = f"model.layers.{index}."
        x = x + self.attention(p + "self_attn.", norm(x, self.w[p + "input_layernorm.weight"], self.eps), first_key)
        y = norm(x, self.w[p + "post_attention_layernorm.weight"], self.eps)
        return x + (self.moe if index >= self.c["first_k_dense_replace"] else self.mlp)(p + "mlp.", y)

    def stream(self, ids: torch.Tensor) -> torch.Tensor:
        """[S] -> the residual stream behind the last layer [S, H]."""
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.c["num_hidden_layers"]):
            x = self.layer(i, x)
        return x

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[S] -> final-normed hidden states [S, H]."""
        return norm(self.stream(ids), self.w["model.norm.weight"], self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.w["lm_head.weight"].T

    def mtp(self, j: int, previous: torch.Tensor, next_ids: torch.Tensor, mask_first: bool = True) -> torch.Tensor:
        """Draft layer j over a whole sequence: row s reads hidden `previous[s]` and token `next_ids[s]` (of s + 1)."""
        w, p = self.w, f"model.layers.{self.c['num_hidden_layers'] + j}."
        embedding = w["model.embed_tokens.weight"][next_ids].clone()
        if mask_first:
            embedding[0] = 0
        x = torch.cat(
            [norm(embedding, w[p + "enorm.weight"], self.eps), norm(previous, w[p + "hnorm.weight"], self.eps)], -1
        )
        x = self.layer(self.c["num_hidden_layers"] + j, x @ w[p + "eh_proj.weight"].T, first_key=j)
        return norm(x, w[p + "shared_head.norm.weight"], self.eps)

    def mtp_logits(self, j: int, hidden: torch.Tensor) -> torch.Tensor:
        head = f"model.layers.{self.c['num_hidden_layers'] + j}.shared_head.head.weight"
        return hidden @ self.w.get(head, self.w["lm_head.weight"]).T

    def drafts(self, ids: list[int], num: int) -> tuple[list[int], list[torch.Tensor]]:
        """Greedy drafts after the committed `ids`, and each one's logits.

        `ids[-1]` is sampled and not yet computed; n layers take turns. The chain is unrolled over the whole sequence,
        with layer j > 0 reading layer j - 1 one position back; what follows the committed tokens is fed back.
        """
        n = self.c["num_nextn_predict_layers"]
        base = len(ids) - 2
        target = self.hidden(torch.tensor(ids[:-1]))
        tokens, chosen, logits = list(ids), [], []
        for step in range(num):
            length = base + 1 + step
            next_ids = torch.tensor(tokens[1 : length + 1])
            outputs = self.unroll(target, next_ids, base, step, n)
            logits.append(self.mtp_logits(step % n, outputs[step % n][length - 1]))
            chosen.append(int(logits[-1].argmax()))
            tokens.append(chosen[-1])
        return chosen, logits

    def unroll(self, target: torch.Tensor, next_ids: torch.Tensor, base: int, step: int, n: int) -> list[torch.Tensor]:
        """Outputs of all layers over positions 0 .. base + step. Layer 0's hidden input past `base` is the last layer's
        output one position back."""
        size = target.shape[1]
        outputs = [torch.zeros(0, size, dtype=target.dtype) for _ in range(n)]
        for extra in range(step + 1):  # one more position of every layer at a time: layer 0 needs the last layer's past
            length = base + 1 + extra
            rows = torch.cat([target, outputs[n - 1][base : length - 1]])[:length]
            for j in range(n):
                outputs[j] = self.mtp(j, rows, next_ids[:length])
                rows = torch.cat([torch.zeros(1, size, dtype=target.dtype), outputs[j][: length - 1]])
        return outputs
