"""Packed models: the same module, one copy of each weight, and the embedding's own weight left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specgen.models import packing
from specgen.models.layers import MLP, Embedding, Head, Linear
from specgen.models.packing import pack_products

CPU = torch.device("cpu")


class _Model(nn.Module):
    """A tied head, an MLP and a small product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = Embedding(40, 32, torch.float32, CPU)
        self.mlp = MLP(32, 48, torch.float32, CPU)
        self.small = Linear(32, 3, torch.float32, CPU)
        self.lm_head = Head(32, 40, torch.float32, CPU)
        for weight in self.parameters():
            nn.init.normal_(weight)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run every product."""
        return torch.cat([self.small(x), self.lm_head(self.mlp(x))], dim=1)


def test_large_products_are_packed_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LARGE", 32 * 40)
    model, x = _Model(), torch.randn(5, 32)
    before = model(x)
    pack_products(model, None)  # type: ignore[arg-type]
    if model.mlp.down_proj.packed is None:
        pytest.skip("this machine's packed products are not used")
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-4)
    assert model.small.packed is None
    assert model.lm_head.packed is not None
    assert model.embed_tokens.weight.device == CPU, "the embedding reads it"
    for linear in (model.mlp.gate_up_proj, model.mlp.down_proj):
        assert linear.weight.is_meta, "no second copy"
        assert linear.packed is not None
        assert linear.packed.shape == tuple(linear.weight.shape)
    held = model.lm_head.packed
    pack_products(model, None)  # type: ignore[arg-type]
    assert model.lm_head.packed is held
