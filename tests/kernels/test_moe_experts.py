"""Routed experts: a naive loop, kernel against twin, crowded and idle experts, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from specgen.kernels import moe_experts as module
from specgen.kernels.moe_experts import moe_experts, moe_experts_torch, moe_experts_triton

# The interpreter's dot multiplies bfloat16's bits; float16 stands in for it there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _case(num_tokens: int, hidden: int, inner: int, experts: int, top_k: int, favourite: float = 0.0) -> Case:
    """Random tokens, each with distinct experts; expert 1 is preferred by `favourite`, the last is never chosen."""
    torch.manual_seed(num_tokens)
    scores = torch.rand(num_tokens, experts)
    scores[:, 1] += favourite
    scores[:, -1] = -1.0
    weights, ids = scores.topk(top_k)
    w13, w2 = torch.randn(experts, 2 * inner, hidden) / hidden**0.5, torch.randn(experts, hidden, inner) / inner**0.5
    return torch.randn(num_tokens, hidden), weights, ids.int(), w13, w2


def _naive(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
    return out.float()


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "experts", "top_k", "favourite"),
    [(37, 48, 40, 8, 2, 0.0), (1, 33, 17, 5, 3, 0.0), (70, 16, 130, 3, 1, 9.0), (0, 16, 16, 4, 2, 0.0)],
)
def test_values(
    kernel_device: str,
    use_kernel: bool,
    num_tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    favourite: float,
) -> None:
    case = _case(num_tokens, hidden, inner, experts, top_k, favourite)
    run, device = (moe_experts_triton, kernel_device) if use_kernel else (moe_experts_torch, "cpu")
    got = run(*(tensor.to(device) for tensor in case)).cpu()
    torch.testing.assert_close(got, _naive(*case), rtol=1e-4, atol=1e-5)


def test_kernel_is_the_twin_in_half_precision(kernel_device: str) -> None:
    x, weights, ids, w13, w2 = _case(37, 48, 40, 8, 2)
    case = (x.to(HALF), weights, ids, w13.to(HALF), w2.to(HALF))
    got = moe_experts_triton(*(tensor.to(kernel_device) for tensor in case)).cpu()
    # Gate, up, their product, the second product and the sum are each rounded to 8 bits.
    torch.testing.assert_close(got, moe_experts_torch(*case), rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]], dtype: torch.dtype
) -> None:
    x, weights, ids, w13, w2 = _case(105, 256, 128, 8, 2)
    x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
    whole = moe_experts(x, weights, ids, w13, w2)
    for rows in row_subsets(105):
        assert torch.equal(moe_experts(x[rows], weights[rows], ids[rows], w13, w2), whole[rows])


def test_kernel_rows_alone(kernel_device: str) -> None:
    x, weights, ids, w13, w2 = (tensor.to(kernel_device) for tensor in _case(41, 48, 40, 5, 2, favourite=0.5))
    whole = moe_experts_triton(x, weights, ids, w13, w2)
    for rows in (slice(0, 1), slice(40, 41), slice(3, 22), slice(7, 41)):
        assert torch.equal(moe_experts_triton(x[rows], weights[rows], ids[rows], w13, w2), whole[rows])


def test_placing_scans_in_pieces(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCAN", 16)
    case = _case(61, 16, 16, 6, 3, favourite=0.4)
    got = moe_experts_triton(*(tensor.to(kernel_device) for tensor in case)).cpu()
    torch.testing.assert_close(got, _naive(*case), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
def test_law_on_the_gpu_in_bfloat16_also_from_a_graph() -> None:
    x, weights, ids, w13, w2 = _case(700, 2048, 1408, 64, 6)
    args = (x.cuda().bfloat16(), weights.cuda(), ids.cuda(), w13.cuda().bfloat16(), w2.cuda().bfloat16())
    whole = moe_experts_triton(*args)
    for size in (1, 2, 4, 17, 64, 129, 300):
        rows = torch.randperm(700)[:size].cuda()
        assert torch.equal(moe_experts_triton(args[0][rows], args[1][rows], args[2][rows], *args[3:]), whole[rows])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts_triton(*args)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, whole)


def test_wrong_arguments_are_refused() -> None:
    x, weights, ids, w13, w2 = _case(3, 16, 16, 4, 2)
    with pytest.raises(ValueError, match="topk_ids: expected dtype"):
        moe_experts(x, weights, ids.long(), w13, w2)
    with pytest.raises(ValueError, match="w13: expected shape"):
        moe_experts(x, weights, ids, w13[:, :-1], w2)
    with pytest.raises(ValueError, match="contiguous"):
        moe_experts(x, weights, ids, w13.transpose(1, 2).contiguous().transpose(1, 2), w2)
