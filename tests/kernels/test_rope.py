"""Rotary embedding: a rotation by hand, transformers' values, clamped positions, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from specgen.kernels.rope import apply_rope
from specgen.models.rope_table import rope_table

TABLE, _ = rope_table(16, 100, 10_000.0, None)


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys as slices of wider rows, as the model has them."""
    torch.manual_seed(num_tokens)
    q, k = torch.randn(num_tokens, 3, 48).to(dtype)[..., 32:], torch.randn(num_tokens, 80).to(dtype)[:, 64:]
    return q, k, torch.randint(0, 100, (num_tokens,))


def test_a_quarter_turn_by_hand() -> None:
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])  # position 1: the first pair by 90 degrees
    q, k = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    q_out, k_out = apply_rope(q, k, torch.tensor([1]), table, interleaved=True)
    assert q_out.tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]
    assert k_out.tolist() == [[-6.0, 5.0, 7.0, 8.0]]
    q_out, k_out = apply_rope(q, k, torch.tensor([1]), table, interleaved=False)
    assert q_out.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
    assert k_out.tolist() == [[-7.0, 6.0, 5.0, 8.0]]
    assert q.tolist() == [[[1.0, 2.0, 3.0, 4.0]]]


@pytest.mark.parametrize("interleaved", [True, False])
def test_twin_is_transformers(interleaved: bool) -> None:
    q, k, positions = _inputs(21)
    cos, sin = (half[positions].repeat(1, 2)[None] for half in TABLE.chunk(2, dim=-1))
    reference = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    want_q, want_k = reference(q.transpose(0, 1)[None], k[None, None], cos, sin)
    got_q, got_k = apply_rope(q, k, positions, TABLE, interleaved)
    if interleaved:  # transformers moves the pairs apart, we keep the input's layout
        got_q, got_k = (torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) for x in (got_q, got_k))
    torch.testing.assert_close(got_q, want_q[0].transpose(0, 1))
    torch.testing.assert_close(got_k, want_k[0, 0])


def test_positions_are_clamped_into_the_table() -> None:
    q, k, _ = _inputs(2)
    outside = apply_rope(q, k, torch.tensor([-1, 100]), TABLE, True)
    assert torch.equal(outside[1], apply_rope(q, k, torch.tensor([0, 99]), TABLE, True)[1])


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    q, k, positions = _inputs(301)
    whole_q, whole_k = apply_rope(q, k, positions, TABLE, True)
    for rows in row_subsets(301):
        part_q, part_k = apply_rope(q[rows], k[rows], positions[rows], TABLE, True)
        assert torch.equal(part_q, whole_q[rows])
        assert torch.equal(part_k, whole_k[rows])
