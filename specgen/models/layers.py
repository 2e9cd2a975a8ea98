"""The plain layers: each a weight and one op of `specgen.kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from specgen.kernels.linear import linear, linear_logits
from specgen.kernels.packed_linear import PackedWeight, pack_weight, packed_linear
from specgen.kernels.rms_norm import rms_norm
from specgen.kernels.silu_mul import silu_mul

_has_memory = True


@contextmanager
def weights_without_memory() -> Iterator[None]:
    """Modules built meanwhile have weights of the meta device, which `give_memory` replaces."""
    global _has_memory
    _has_memory = False
    try:
        yield
    finally:
        _has_memory = True


def give_memory(module: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Replaces the module's weights without memory by unset ones on `device`; weights that were one stay one.

    Returns the new weights by the address of the old one's storage.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.is_meta:
                key = weight.untyped_storage()._cdata
                if key not in made:
                    made[key] = empty_weight(*weight.shape, dtype=weight.dtype, device=device)
                setattr(part, name, made[key])
    return made


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unset weight; the loader fills every element or refuses the checkpoint."""
    where = device if _has_memory else "meta"
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=where), requires_grad=False)


class Linear(nn.Module):
    """Product with `weight [out, in]`, no bias; a row's bits do not depend on how many rows there are.

    On a CPU the weight may be held in `packed`; `weight` then has its shape and dtype, and no elements.
    """

    packed: PackedWeight | None = None

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_weight(num_out, num_in, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`."""
        return linear(x, self.weight) if self.packed is None else packed_linear(x, self.packed)

    def pack(self, keeps_weight: bool) -> None:
        """Holds the weight in the CPU's own layout if that is of use; `keeps_weight`: somebody else reads it too."""
        self.packed = pack_weight(self.weight)
        if self.packed is not None and not keeps_weight:
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)


class Head(Linear):
    """The product that gives logits, `weight [vocab, hidden]`: a `Linear` whose results are float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden] -> [N, vocab] float32`."""
        if self.packed is not None:
            return packed_linear(x, self.packed).float()
        return linear_logits(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm, with the residual sum in front of it where one is given."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H] -> [T, H]`."""
        out = rms_norm(x, self.weight, self.eps)
        assert isinstance(out, torch.Tensor)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and `residual`, which is that sum then, each `[T, H]`."""
        out = rms_norm(x, self.weight, self.eps, residual)
        assert isinstance(out, tuple)
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product. Many tokens go in parts: the inner rows are wide."""

    most_tokens = 4096  # at once: twice as many are no faster

    def __init__(self, hidden_size: int, inner_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * inner_size, dtype, device)
        self.down_proj = Linear(inner_size, hidden_size, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H] -> [T, H]`."""
        if len(x) <= self.most_tokens:
            return self.down_proj(silu_mul(self.gate_up_proj(x)))
        out = torch.empty_like(x)
        for part, result in zip(x.split(self.most_tokens), out.split(self.most_tokens), strict=True):
            result.copy_(self.forward(part))
        return out


class Embedding(nn.Module):
    """Token embeddings `weight [vocab, hidden]`. Placeholder ids (< 0) read row 0: what they give is never used."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[T] int64 -> [T, H]`."""
        return self.weight[input_ids.clamp(min=0)]
