"""Layers that work in parts give the bits of the whole."""

import pytest
import torch

from specgen.models.layers import MLP

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [32, 33, 80])
def test_many_tokens_of_an_mlp_go_in_parts(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mlp = MLP(32, 48, torch.float32, CPU)
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(num_tokens, 32)
    inner: list[int] = []
    mlp.gate_up_proj.register_forward_hook(lambda module, args, out: inner.append(len(out)))
    with torch.inference_mode():
        whole = mlp(x)
        monkeypatch.setattr(MLP, "most_tokens", 32)
        assert torch.equal(mlp(x), whole)
    assert inner == [num_tokens, *(len(part) for part in x.split(32))]
