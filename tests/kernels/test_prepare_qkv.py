"""Queries, keys and values made ready: naive float64 values, kernel and twin, slots, and the law by rows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specgen.kernels.prepare_qkv import prepare_qkv, prepare_qkv_torch, prepare_qkv_triton

EPS = 1e-5
CANARY = -77.0
# heads, key heads, head size, rotated size
SIZES = [(4, 2, 16, 16), (9, 3, 24, 8), (3, 1, 10, 10), (14, 2, 64, 32)]


def arguments(
    num_tokens: int, size: tuple[int, int, int, int], bias: bool, norm: bool, interleaved: bool, device: str = "cpu"
) -> list[Any]:
    """The op's arguments; the cache is full of canaries, tokens lie in its slots backwards, every third nowhere."""
    heads, kv_heads, dim, rotated = size
    g = torch.Generator().manual_seed(1)
    width = (heads + 2 * kv_heads) * dim
    angles = torch.rand(50, rotated // 2, generator=g) * 6
    slots = torch.arange(num_tokens).flip(0) + 1
    slots[::3] = -1
    args = [
        torch.randn(num_tokens, width, generator=g),
        torch.randint(0, 50, (num_tokens,), generator=g),
        torch.cat([angles.cos(), angles.sin()], -1),
        slots,
        torch.full((num_tokens // 4 + 1, 4, 2 * kv_heads * dim), CANARY),
        heads,
        kv_heads,
        torch.randn(width, generator=g) if bias else None,
        torch.rand(dim, generator=g) + 0.5 if norm else None,
        torch.rand(dim, generator=g) + 0.5 if norm else None,
        EPS,
        interleaved,
    ]
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def naive(args: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and the rows of keys and values [T, 2 Hkv, D], one head at a time in float64."""
    qkv, positions, table, _, _, heads, kv_heads, bias, q_norm, k_norm, eps, interleaved = args
    rows = (qkv.double() + (0 if bias is None else bias.double())).view(len(qkv), heads + 2 * kv_heads, -1)
    half, out = table.shape[1] // 2, rows.clone()
    for t in range(len(qkv)):
        cos, sin = table[positions[t]].double().chunk(2)
        for h in range(heads + kv_heads):
            x = rows[t, h]
            if q_norm is not None:
                x = x / (x.square().mean() + eps).sqrt() * (q_norm if h < heads else k_norm)
            out[t, h] = x
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                out[t, h, a] = x[a] * cos[i] - x[b] * sin[i]
                out[t, h, b] = x[b] * cos[i] + x[a] * sin[i]
    return out[:, :heads].float(), out[:, heads:].float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("bias", "norm"), [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_slots(
    kernel_device: str, size: tuple[int, int, int, int], bias: bool, norm: bool, interleaved: bool
) -> None:
    want_q, want_rows = naive(arguments(7, size, bias, norm, interleaved))
    for run, device in ((prepare_qkv_torch, "cpu"), (prepare_qkv_triton, kernel_device)):
        args = arguments(7, size, bias, norm, interleaved, device)
        q = run(*args)
        torch.testing.assert_close(q.cpu(), want_q, rtol=1e-5, atol=2e-6)
        want = torch.full((8, *want_rows.shape[1:]), CANARY)
        for t, slot in enumerate(args[3].tolist()):
            if slot >= 0:
                want[slot] = want_rows[t]
        torch.testing.assert_close(args[4].cpu().view(want.shape), want, rtol=1e-5, atol=2e-6)


def test_rounding_is_transformers_in_half_precision(kernel_device: str) -> None:
    """Kernel and twin round at the same places: after bias, norm, weight and rotation."""
    # The interpreter's bfloat16 rounds differently, so float16 stands in for it there.
    half = torch.bfloat16 if kernel_device == "cuda" else torch.float16
    args = arguments(9, SIZES[1], True, True, False, kernel_device)
    for i in (0, 4, 7, 8, 9):
        args[i] = args[i].to(half)
    mine = [a.cpu().clone() if isinstance(a, torch.Tensor) else a for a in args]
    got, want = prepare_qkv_triton(*args).cpu(), prepare_qkv_torch(*mine)
    # The sums of squares are added in another order, so that a rare element rounds to its neighbour.
    assert (got != want).float().mean() < 0.01
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def test_row_bits_are_their_own(row_subsets: Callable[[int], Iterator[torch.Tensor]], threads: int) -> None:
    args = arguments(130, (9, 3, 64, 64), True, True, False)
    want = prepare_qkv(*args)
    cache = args[4].clone()
    for rows in row_subsets(130):
        args[4].fill_(CANARY)
        some = [args[0][rows], args[1][rows], args[2], args[3][rows], *args[4:]]
        assert torch.equal(prepare_qkv(*some), want[rows])
        slots = args[3][rows]
        slots = slots[slots >= 0]
        assert torch.equal(args[4].view(-1, 384)[slots], cache.view(-1, 384)[slots])


def test_nothing_to_do_and_wrong_arguments() -> None:
    args = arguments(0, SIZES[0], False, False, False)
    assert prepare_qkv(*args).shape == (0, 4, 16)
    args = arguments(3, SIZES[0], True, True, False)
    for i, wrong, message in [
        (0, args[0][:, :-1], "kv_cache: expected shape|qkv: expected shape"),
        (2, args[2][:, :-1], "cos_sin: expected an even width"),
        (4, args[4].half(), "kv_cache: expected dtype"),
        (7, args[7][:-1], "bias: expected shape"),
        (8, None, "both or none"),
        (9, args[9][:-1], "k_norm: expected shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare_qkv(*args[:i], wrong, *args[i + 1 :])
