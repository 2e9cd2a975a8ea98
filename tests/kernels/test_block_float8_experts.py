"""Experts with FP8 weights and a scale for each row and 128 columns: kernel, twin, and one product at a time."""

import pytest
import torch

from specgen.kernels.block_float8_experts import (
    BlockScales,
    block_float8_experts,
    block_float8_experts_torch,
    block_float8_experts_triton,
)
from specgen.kernels.block_float8_linear import dequantize_blocks
from specgen.kernels.moe_experts import ExpertRows

EXPERTS, HIDDEN, INNER = 5, 200, 40


def arguments(num_tokens: int, top_k: int, device: str = "cpu") -> tuple:  # type: ignore[type-arg]
    g = torch.Generator().manual_seed(num_tokens)

    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = (torch.randn(EXPERTS, rows, columns, generator=g) * 60).to(torch.float8_e4m3fn)
        return values, torch.rand(EXPERTS, -(-columns // 128), rows, generator=g) * 0.002 + 0.001

    (w13, s13), (w2, s2) = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(num_tokens)]).int()
    x = torch.randn(num_tokens, HIDDEN, generator=g)
    return (*(t.to(device) for t in (x, ids, w13, w2)), BlockScales(s13.to(device), s2.to(device)))


def by_pair(result: ExpertRows, num_tokens: int, top_k: int) -> torch.Tensor:
    places = result.places
    rows = result.rows if places is None else result.rows[places.flatten().long()]
    return rows[: num_tokens * top_k].view(num_tokens, top_k, -1).cpu()


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (7, 3), (40, 2)])
def test_values(kernel_device: str, num_tokens: int, top_k: int) -> None:
    x, ids, w13, w2, scales = arguments(num_tokens, top_k)
    want = torch.empty(num_tokens, top_k, HIDDEN, dtype=torch.float64)
    for t in range(num_tokens):
        for j, e in enumerate(ids[t].tolist()):
            gate, up = (dequantize_blocks(w13[e], scales.w13[e], torch.float32).double() @ x[t].double()).chunk(2)
            down = dequantize_blocks(w2[e], scales.w2[e], torch.float32).double()
            want[t, j] = down @ (gate * gate.sigmoid() * up)
    twin = by_pair(block_float8_experts_torch(x, ids, w13, w2, scales), num_tokens, top_k)
    kernel = by_pair(block_float8_experts_triton(*arguments(num_tokens, top_k, kernel_device)), num_tokens, top_k)
    torch.testing.assert_close(twin.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernel.double(), want, rtol=1e-4, atol=1e-4)


def test_a_token_alone_is_the_token_in_company(kernel_device: str) -> None:
    args = arguments(9, 2, kernel_device)
    if kernel_device == "cuda":
        args = (args[0].bfloat16(), *args[1:])
    for op, device in ((block_float8_experts_torch, "cpu"), (block_float8_experts_triton, kernel_device)):
        x, ids, w13, w2, scales = (a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
        scales = BlockScales(*(scale.to(device) for scale in scales))
        whole = by_pair(op(x, ids, w13, w2, scales), 9, 2)
        for t in (0, 8):
            alone = by_pair(op(x[t : t + 1], ids[t : t + 1], w13, w2, scales), 1, 2)
            assert torch.equal(alone[0], whole[t])


def test_wrong_arguments_are_refused() -> None:
    x, ids, w13, w2, scales = arguments(3, 2)
    with pytest.raises(ValueError, match="w13: expected dtype"):
        block_float8_experts(x, ids, w13.float(), w2, scales)
    with pytest.raises(ValueError, match=r"scales\.w2: expected shape"):
        block_float8_experts(x, ids, w13, w2, BlockScales(scales.w13, scales.w13))
