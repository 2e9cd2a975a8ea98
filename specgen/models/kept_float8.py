"""Products whose weights stay in FP8, with the checkpoint's own scales: half the bytes of bfloat16 to read.

A product is kept if all tensors that it is fused of are stored in FP8, a layer's experts if all of them are. What is
folded into the latent attention's products is turned into the model's dtype as `fp8` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from specgen.kernels.block_float8_experts import BlockScales
from specgen.kernels.block_float8_linear import BLOCK, FLOAT8, block_float8_linear
from specgen.models.checkpoint import StoredTensor
from specgen.models.deepseek_v3 import MoE
from specgen.models.fp8 import scale_names
from specgen.models.layers import Linear
from specgen.models.weights import Plan, Target

Fill = Callable[[torch.Tensor], torch.Tensor] | None

_DRAFT_PROJECTIONS = ("eh_proj.weight", "input_proj.weight")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class BlockFloat8Linear(nn.Module):
    """Product with an FP8 weight `[out, in]` and one scale for each row and 128 columns, `[in / 128, out] float32`."""

    def __init__(self, num_in: int, num_out: int, device: torch.device) -> None:
        super().__init__()
        blocks = -(-num_in // BLOCK)
        self.values = nn.Parameter(torch.empty(num_out, num_in, dtype=FLOAT8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(blocks, num_out, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`."""
        return block_float8_linear(x, self.values, self.scale)


def as_if_stored(plan: Plan) -> dict[str, StoredTensor]:
    """The tensors that DeepSeek's FP8 checkpoints of such a model hold in FP8, for a model of random weights."""
    stored = {}
    for name, target in plan.items():
        if (
            len(target.shape) == 2
            and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
            and not name.endswith(_DRAFT_PROJECTIONS)
        ):
            blocks = (-(-target.shape[0] // BLOCK), -(-target.shape[1] // BLOCK))
            stored[name] = StoredTensor(name, Path(), "F8_E4M3", target.shape, 0, 0)
            stored[name + "_scale_inv"] = StoredTensor(name + "_scale_inv", Path(), "F32", blocks, 0, 0)
    return stored


def keep_float8(root: nn.Module, plan: Plan, stored: Mapping[str, StoredTensor], device: torch.device) -> int:
    """Replaces the products and experts of `root` that are stored in FP8; `plan` fills the new ones afterwards.

    Returns how many were replaced. Raises: ModelError for an FP8 tensor without a scale that fits.
    """
    scales = scale_names(stored, [name for name in plan if name in stored])
    by_memory: dict[int, list[str]] = {}
    for name, target in plan.items():
        for weight, _ in target.parts:
            by_memory.setdefault(weight.untyped_storage()._cdata, []).append(name)
    count = 0
    for parent in list(root.modules()):
        if isinstance(parent, MoE):
            names = [n for w in (parent.w13, parent.w2) for n in by_memory[w.untyped_storage()._cdata]]
            if all(name in scales for name in names) and parent.config.moe_intermediate_size % BLOCK == 0:
                _keep_experts(parent, names, plan, scales, stored, device)
                count += 1
        for attribute, child in list(parent.named_children()):
            if type(child) is not Linear:
                continue
            names = by_memory.get(child.weight.untyped_storage()._cdata, [])
            is_whole = all(len(plan[name].parts) == 1 and plan[name].parts[0][1] is None for name in names)
            if names and is_whole and all(name in scales for name in names):
                setattr(parent, attribute, _kept(child, names, plan, scales, stored, device))
                count += 1
    return count


def _kept(
    linear: Linear,
    names: list[str],
    plan: Plan,
    scales: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    device: torch.device,
) -> BlockFloat8Linear:
    """The product in FP8, its tensors in the plan in place of the old ones."""
    num_out, num_in = linear.weight.shape
    kept = BlockFloat8Linear(num_in, num_out, device)
    for name in names:
        first = plan[name].parts[0][0].storage_offset() // num_in
        num_rows = plan[name].shape[0]
        plan[name] = Target(plan[name].shape, [(kept.values[first : first + num_rows], None)])
        scale = kept.scale[:, first : first + num_rows]
        expand = partial(_by_row, num_rows=num_rows, num_blocks=len(scale))
        plan[scales[name]] = Target(stored[scales[name]].shape, [(scale, expand)])
    return kept


def _keep_experts(
    moe: MoE,
    names: list[str],
    plan: Plan,
    scales: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    device: torch.device,
) -> None:
    """The layer's experts in FP8, the shared ones, stored as one wide expert, among them."""
    num_experts, hidden, inner = moe.w2.shape
    num_routed = moe.config.n_routed_experts
    num_shared, in_blocks, out_blocks = num_experts - num_routed, -(-hidden // BLOCK), inner // BLOCK
    moe.w13 = nn.Parameter(torch.empty(moe.w13.shape, dtype=FLOAT8, device=device), requires_grad=False)
    moe.w2 = nn.Parameter(torch.empty(moe.w2.shape, dtype=FLOAT8, device=device), requires_grad=False)
    moe.scales = BlockScales(
        torch.empty(num_experts, in_blocks, 2 * inner, device=device),
        torch.empty(num_experts, out_blocks, hidden, device=device),
    )
    halves = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}
    for name in names:
        part = name.removesuffix("_proj.weight").rpartition(".")[2]
        expert = _EXPERT.search(name)
        experts = slice(num_routed, None) if expert is None else int(expert.group(1))
        fill: Fill = None
        if part == "down":
            weight, scale = moe.w2[experts], moe.scales.w2[experts]
            expand: Fill = partial(_by_row, num_rows=hidden, num_blocks=out_blocks)
            if expert is None:
                fill = partial(_split_columns, num=num_shared)
                expand = partial(_shared_down_scale, num_rows=hidden, num=num_shared, num_blocks=out_blocks)
        else:
            weight, scale = moe.w13[experts][..., halves[part], :], moe.scales.w13[experts][..., halves[part]]
            expand = partial(_by_row, num_rows=inner, num_blocks=in_blocks)
            if expert is None:
                fill = partial(_split_rows, num=num_shared)
                expand = partial(_shared_up_scale, num_rows=inner, num=num_shared, num_blocks=in_blocks)
        plan[name] = Target(plan[name].shape, [(weight, fill)])
        plan[scales[name]] = Target(stored[scales[name]].shape, [(scale, expand)])


def _split_rows(tensor: torch.Tensor, num: int) -> torch.Tensor:
    return tensor.unflatten(0, (num, -1))


def _split_columns(tensor: torch.Tensor, num: int) -> torch.Tensor:
    return tensor.unflatten(1, (num, -1)).transpose(0, 1)


def _shared_up_scale(scale: torch.Tensor, num_rows: int, num: int, num_blocks: int) -> torch.Tensor:
    return _by_row(scale, num * num_rows, num_blocks).unflatten(1, (num, num_rows)).transpose(0, 1)


def _shared_down_scale(scale: torch.Tensor, num_rows: int, num: int, num_blocks: int) -> torch.Tensor:
    return _by_row(scale, num_rows, num * num_blocks).unflatten(0, (num, num_blocks))


def _by_row(scale: torch.Tensor, num_rows: int, num_blocks: int) -> torch.Tensor:
    """A stored scale, of any layout, as `[blocks, rows]`."""
    if scale.dim() == 2 and scale.shape == (-(-num_rows // BLOCK), num_blocks) and scale.shape != (num_rows, 1):
        return scale.repeat_interleave(BLOCK, 0)[:num_rows].T
    return scale.reshape(1, -1).expand(num_blocks, num_rows)
