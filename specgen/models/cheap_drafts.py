"""Draft layers made cheaper than they were trained: weights in FP8, and a head over a part of the vocabulary.

Both may cost accepted drafts, and can't change a token where drafts are judged by comparison. The target is left as it
is.

Large products are made from FP8 weights while a step has few rows, when the reading of weights is what takes time; with
more rows, as in prefill, from the weights that were loaded: they are there anyway where the head is the target's, and
small beside the target's layers. A head of the draft layers' own, and their experts, are held in FP8 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specgen.kernels.float8_linear import MAX_ROWS, float8_linear, quantize_rows
from specgen.kernels.sample_tokens import expand_logits
from specgen.models.deepseek_v3 import MoE
from specgen.models.families import DraftModel, TargetModel
from specgen.models.layers import Head, Linear

# Elements of a projection from which on FP8 pays: smaller ones are read within the time of the launch it adds.
LARGE_WEIGHT = 1 << 24


@dataclass(frozen=True, slots=True)
class CheapDrafts:
    """What is saved. vocab_size: drafts are the tokens below it, or one of `extra_ids`; None is all of them."""

    float8: bool = False
    vocab_size: int | None = None
    extra_ids: tuple[int, ...] = ()


AS_LOADED = CheapDrafts()  # nothing is saved


class Float8Linear(nn.Module):
    """A product with a copy of a weight in FP8, up to 64 rows; with more, `wide`'s if there is one."""

    def __init__(self, weight: torch.Tensor, wide: Linear | None, out_dtype: torch.dtype) -> None:
        """Rounds `weight [out, in]`; results in `out_dtype`, of `wide` as it gives them."""
        super().__init__()
        self.rounded = quantize_rows(weight)
        self.wide = wide
        self.out_dtype = out_dtype

    @property
    def weight(self) -> torch.Tensor:
        """What was rounded, where it is kept."""
        assert self.wide is not None
        return self.wide.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`."""
        if self.wide is not None and x.shape[0] > MAX_ROWS:
            out: torch.Tensor = self.wide(x)
            return out
        return float8_linear(x.contiguous(), self.rounded, self.out_dtype)


class CutHead(nn.Module):
    """A head over the lowest token ids and a few others, `extra_ids [E] int32`, rising."""

    extra_ids: torch.Tensor

    def __init__(self, lowest: nn.Module, extra: Head | None, extra_ids: torch.Tensor, vocab_size: int) -> None:
        """`lowest` gives the logits of the first ids, `extra` those of `extra_ids`; `vocab_size` is the whole one."""
        super().__init__()
        self.lowest = lowest
        self.extra = extra
        self.register_buffer("extra_ids", extra_ids, persistent=False)
        self.vocab_size = vocab_size

    def forward(self, hidden: torch.Tensor, whole: bool = True) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`, -inf for tokens that it leaves out; without `whole` those of the lowest ids
        and then of `extra_ids` alone.
        """
        logits: torch.Tensor = self.lowest(hidden)
        if self.extra is not None:
            lowest, extra = logits, self.extra(hidden)
            width = lowest.shape[1] + extra.shape[1]
            # rows begin at multiples of 64 bytes, so that several logits are read at a time
            logits = lowest.new_empty(lowest.shape[0], -(-width // 16) * 16)[:, :width]
            torch.cat([lowest, extra], dim=1, out=logits)
        return expand_logits(logits, self.extra_ids, self.vocab_size) if whole else logits


def cheapen(mtp: DraftModel, target: TargetModel, options: CheapDrafts) -> None:
    """Replaces the draft layers' weights and heads in place; layers that share the target's head share its copy too."""
    if options.float8:
        for module in list(mtp.layers.modules()):
            if isinstance(module, MoE):
                module.hold_in_float8()
            for name, part in list(module.named_children()):
                if isinstance(part, Linear) and part.weight.numel() >= LARGE_WEIGHT:
                    setattr(module, name, Float8Linear(part.weight, part, part.weight.dtype))
    made: dict[int, nn.Module] = {}
    for i, head in enumerate(mtp.heads):
        if id(head) not in made:
            made[id(head)] = _cheap_head(head, head is target.lm_head, options)
        mtp.heads[i] = made[id(head)]


def _cheap_head(head: Any, is_shared: bool, options: CheapDrafts) -> nn.Module:
    weight: torch.Tensor = head.weight
    vocab_size = weight.shape[0]
    kept = min(options.vocab_size or vocab_size, vocab_size)
    # the target's weight is there anyway; one of the layers' own is not kept for a part of it
    lowest = weight[:kept] if is_shared or kept == vocab_size else weight[:kept].clone()
    linear: nn.Module = _head_over(lowest)
    if options.float8:
        linear = Float8Linear(lowest, _head_over(lowest) if is_shared else None, torch.float32)
    if kept == vocab_size:
        return linear if options.float8 else head
    extra_ids = sorted({i for i in options.extra_ids if kept <= i < vocab_size})
    rows = torch.tensor(extra_ids, dtype=torch.int32, device=weight.device)
    return CutHead(linear, _head_over(weight[rows]) if extra_ids else None, rows, vocab_size)


def _head_over(weight: torch.Tensor) -> Head:
    """A product with this very weight."""
    head = Head(weight.shape[1], weight.shape[0], weight.dtype, torch.device("meta"))
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head
