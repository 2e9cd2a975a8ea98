"""Embedding and hidden state, each normed, side by side: against torch's own lookup and norm."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specgen.kernels.draft_layer_inputs import (
    draft_layer_inputs,
    draft_layer_inputs_torch,
    draft_layer_inputs_triton,
)

WIDTH, VOCAB, EPS = 40, 11, 1e-5


def case(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Positions from 0 up, the last id a placeholder, hidden states with a stride."""
    g = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, VOCAB, (num_tokens,), generator=g)
    ids[-1:] = -1
    table, previous = (torch.randn(n, WIDTH + 3, generator=g).to(dtype) for n in (VOCAB, num_tokens))
    weights = [torch.randn(WIDTH, generator=g).to(dtype) for _ in range(2)]
    return [ids, torch.arange(num_tokens), table[:, :WIDTH].contiguous(), previous[:, :WIDTH], *weights]


@pytest.mark.parametrize("mask_first", [False, True])
@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("run", [draft_layer_inputs_torch, draft_layer_inputs_triton])
def test_values(kernel_device: str, run: Any, num_tokens: int, hidden_first: bool, mask_first: bool) -> None:
    device = kernel_device if run is draft_layer_inputs_triton else "cpu"
    ids, positions, table, previous, embedding_norm, hidden_norm = (t.to(device) for t in case(num_tokens))
    got = run(ids, positions, table, previous, embedding_norm, hidden_norm, EPS, hidden_first, mask_first)
    embedded = table.double()[ids.clamp(min=0)]
    if mask_first:
        embedded[positions == 0] = 0
    first = F.rms_norm(embedded, (WIDTH,), embedding_norm.double(), EPS)
    second = F.rms_norm(previous.double(), (WIDTH,), hidden_norm.double(), EPS)
    want = torch.cat([second, first] if hidden_first else [first, second], dim=1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_a_row_alone_is_the_row_in_company(kernel_device: str) -> None:
    ids, positions, *rest = (t.to(kernel_device) for t in case(6))
    for run in (draft_layer_inputs, draft_layer_inputs_triton):
        whole = run(ids, positions, *rest, EPS, True, True)
        for i in range(6):
            table, previous, *weights = rest
            alone = run(ids[i : i + 1], positions[i : i + 1], table, previous[i : i + 1], *weights, EPS, True, True)
            assert torch.equal(alone[0], whole[i])


def test_wrong_arguments_are_refused() -> None:
    ids, positions, table, *rest = case(3)
    with pytest.raises(ValueError, match="input_ids: expected dtype"):
        draft_layer_inputs(ids.int(), positions, table, *rest, EPS, False, False)
    with pytest.raises(ValueError, match="embedding: expected a contiguous"):
        draft_layer_inputs(ids, positions, F.pad(table, (0, 3))[:, :WIDTH], *rest, EPS, False, False)
    with pytest.raises(ValueError, match="hidden_norm"):
        draft_layer_inputs(ids, positions, table, rest[0], rest[1], rest[2][:-1], EPS, False, False)
