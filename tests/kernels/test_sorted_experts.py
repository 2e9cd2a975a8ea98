"""Sorting by hand, and products of sorted rows against a plain loop."""

import pytest
import torch
import torch.nn.functional as F

from specgen.kernels import _sorted_experts as module
from specgen.kernels._sorted_experts import sort_pairs, sorted_products
from specgen.kernels._triton import is_hopper, not_compiled

# The interpreter's dot multiplies bfloat16's bits; float16 stands in for it there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that there are several of each kind."""
    monkeypatch.setattr(module, "is_hopper", lambda: False)
    monkeypatch.setattr(module, "_CHUNK", 16)
    monkeypatch.setattr(module, "_TILES", {16: ((16, 16, 2), (32, 16, 2)), 128: ((32, 32, 2), (32, 32, 2))})


def test_tokens_places_and_tiles_by_hand(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 4)  # the second of two chunks isn't full
    ids = torch.tensor([[2, 0], [0, 3], [2, 0]], dtype=torch.int32, device=kernel_device)
    pairs = sort_pairs(ids, 5, height=2)
    assert pairs.tokens.tolist() == [0, 1, 2, 0, 2, 1]
    assert pairs.places.tolist() == [3, 0, 1, 5, 4, 2]
    assert pairs.num_tiles.tolist() == [4]
    assert pairs.tiles[:, :4].T.tolist() == [[0, 0, 2], [0, 2, 3], [2, 3, 5], [3, 5, 6]]


@pytest.mark.parametrize("favourite", [0.0, 9.0])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (7, 3, 4), (150, 2, 6), (2100, 4, 64)])
def test_every_pair_has_its_place(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch, num_tokens: int, top_k: int, num_experts: int, favourite: float
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2048 if num_experts == 64 else 64)
    torch.manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts)
    scores[:, -1] += favourite
    ids = scores.topk(top_k).indices.int()
    pairs = sort_pairs(ids.to(kernel_device), num_experts, height=16)
    order = ids.flatten().sort(stable=True).indices
    assert pairs.tokens.tolist() == (order // top_k).tolist()
    assert pairs.places[order.to(kernel_device)].tolist() == list(range(len(order)))
    expected, row = [], 0
    for expert, count in enumerate(ids.flatten().bincount(minlength=num_experts).tolist()):
        expected += [[expert, first, min(first + 16, row + count)] for first in range(row, row + count, 16)]
        row += count
    assert pairs.num_tiles.item() == len(expected) <= pairs.tiles.shape[1]
    assert pairs.tiles[:, : len(expected)].T.tolist() == expected


def test_shared_experts_tiles_stand_between_the_others(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed 0, 1, 2 with 2, 0 and 2 tiles, shared 3 and 4 with 3 each: groups of two before routed tiles 0, 1, 2."""
    monkeypatch.setattr(module, "_GROUP", 2)
    ids = torch.tensor([[e, 3, 4] for e in (0, 0, 0, 2, 2, 2)], dtype=torch.int32, device=kernel_device)
    pairs = sort_pairs(ids, 5, num_shared=2, height=2)
    want = [(3, 6, 8), (3, 8, 10), (0, 0, 2), (3, 10, 12), (4, 12, 14), (0, 2, 3), (4, 14, 16), (4, 16, 18)]
    assert [tuple(t) for t in pairs.tiles[:, : pairs.num_tiles.item()].T.tolist()] == [*want, (2, 3, 5), (2, 5, 6)]


@pytest.mark.parametrize("num_tokens", [1, 17, 150])
@pytest.mark.parametrize(("num_experts", "num_shared"), [(6, 1), (9, 3), (3, 3)])
def test_with_shared_experts_there_is_every_tile_once(
    kernel_device: str, num_tokens: int, num_experts: int, num_shared: int
) -> None:
    torch.manual_seed(0)
    num_routed = num_experts - num_shared
    chosen = torch.rand(num_tokens, num_routed).topk(min(2, num_routed)).indices
    shared = torch.arange(num_routed, num_experts).expand(num_tokens, -1)
    ids = torch.cat([chosen, shared], dim=1).int().to(kernel_device)
    tiles = [sort_pairs(ids, num_experts, n, height=16) for n in (0, num_shared)]
    plain, between = (sorted(p.tiles[:, : p.num_tiles.item()].T.tolist()) for p in tiles)
    assert between == plain


@pytest.mark.parametrize("height", [16, 128])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "experts", "top_k"), [(37, 48, 40, 5, 2), (1, 16, 8, 3, 1), (70, 24, 72, 3, 3)]
)
def test_products(
    kernel_device: str, small: None, num_tokens: int, hidden: int, inner: int, experts: int, top_k: int, height: int
) -> None:
    torch.manual_seed(0)
    ids = torch.rand(num_tokens, experts).topk(top_k).indices.int()
    x = torch.randn(num_tokens, hidden).to(HALF)
    w13 = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(HALF)
    w2 = (torch.randn(experts, hidden, inner) / inner**0.5).to(HALF)
    pairs = sort_pairs(ids.to(kernel_device), experts, 1, height)
    out = sorted_products(x.to(kernel_device), pairs, w13.to(kernel_device), w2.to(kernel_device))
    got = out[pairs.places.long()].cpu().float().view(num_tokens, top_k, hidden)
    for token in range(num_tokens):
        for j, expert in enumerate(ids[token].tolist()):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            want = (w2[expert].double() @ (F.silu(gate) * up)).float()
            # Gate, up, their product and the second product are each rounded.
            torch.testing.assert_close(got[token, j], want, rtol=2**-5, atol=2**-5)


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and is_hopper()), reason="needs a Hopper GPU")
@pytest.mark.parametrize("height", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "experts", "top_k"),
    [(1, 64, 64, 3, 1), (300, 256, 200, 5, 2), (3000, 1024, 456, 9, 3), (1500, 2048, 1408, 66, 8)],
)
def test_hopper_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, hidden: int, inner: int, experts: int, top_k: int, height: int
) -> None:
    """Columns that no block divides, experts without rows, tiles of one row."""
    torch.manual_seed(0)
    scores = torch.rand(num_tokens, experts, device="cuda")
    scores[:, 1] = 0
    scores[1:, 2] = 0
    ids = scores.topk(top_k).indices.int()
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    w13 = (torch.randn(experts, 2 * inner, hidden, device="cuda") / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, device="cuda") / inner**0.5).bfloat16()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "is_hopper", lambda: False)
        want = sorted_products(x, sort_pairs(ids, experts), w13, w2)
    pairs = sort_pairs(ids, experts, 1, height)
    for _ in range(3):
        assert torch.equal(sorted_products(x, pairs, w13, w2), want)
    assert "experts of many tokens" not in not_compiled


def test_few_kernels_sort_and_none_looks_at_many_more_chunks_than_there_are() -> None:
    """A kernel for each number of chunks is compiled, and compiling and running it take what it looks at."""
    looked_at = {num: module._looked_at(num) for num in range(1, 600)}
    assert [looked_at[num] for num in (1, 2, 8, 9, 64, 65, 72, 129)] == [1, 8, 8, 64, 64, 128, 128, 256]
    assert all(most >= num for num, most in looked_at.items()) and len(set(looked_at.values())) == 7
