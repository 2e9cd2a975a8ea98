"""Weights as FP8 checkpoints store them, and what `config.json` declares about them."""

from __future__ import annotations

from typing import Any

import torch

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def quantise(
    weights: dict[str, torch.Tensor], layout: str, skip: str = "embed|head|gate.weight|eh_proj"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights as an FP8 checkpoint stores them, and what they mean, in float32."""
    stored, meant = {}, {}
    for name, weight in weights.items():
        if weight.dim() != 2 or any(word in name for word in skip.split("|")):
            stored[name] = meant[name] = weight
            continue
        weight = weight.float()
        rows, columns = weight.shape
        if layout == "block":
            shape = (-(-rows // 128), -(-columns // 128))
            index = (torch.arange(rows)[:, None] // 128 * shape[1] + torch.arange(columns) // 128).flatten()
            size = torch.zeros(shape[0] * shape[1]).scatter_reduce(0, index, weight.abs().flatten(), "amax")
            scale, full = (size / 448).view(shape), (size / 448)[index].view(rows, columns)
        else:
            scale = weight.abs().amax(1, keepdim=True) / 448 if layout == "channel" else weight.abs().amax() / 448
            full = scale.expand(rows, columns)
        stored[name] = (weight / full).to(torch.float8_e4m3fn)
        stored[name + ("_scale_inv" if layout == "block" else "_scale")] = scale
        meant[name] = stored[name].float() * full
    return stored, meant
