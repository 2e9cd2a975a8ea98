"""Experts: a naive loop, kernel against twin, crowded and idle experts, shared ones, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from specgen.kernels import _expert_tiles, _grouped_experts
from specgen.kernels.float8_linear import Float8Weight, dequantize_rows, quantize_rows
from specgen.kernels.moe_experts import (
    ExpertRows,
    ExpertScales,
    moe_experts,
    moe_experts_sorted,
    moe_experts_torch,
    moe_experts_triton,
)

# The interpreter's dot multiplies bfloat16's bits; float16 stands in for it there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _case(
    num_tokens: int, hidden: int, inner: int, experts: int, top_k: int, favourite: float = 0.0, num_shared: int = 0
) -> Case:
    """Random tokens, each with distinct experts; expert 1 is preferred by `favourite`, the last is never chosen.

    The shared experts come behind the others.
    """
    torch.manual_seed(num_tokens)
    scores = torch.rand(num_tokens, experts)
    scores[:, 1] += favourite
    scores[:, -1] = -1.0
    ids = torch.cat([scores.topk(top_k).indices, torch.arange(experts, experts + num_shared).expand(num_tokens, -1)], 1)
    w13 = torch.randn(experts + num_shared, 2 * inner, hidden) / hidden**0.5
    w2 = torch.randn(experts + num_shared, hidden, inner) / inner**0.5
    return torch.randn(num_tokens, hidden), ids.int(), w13, w2


def _by_choice(out: ExpertRows, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows as [T, k, H]."""
    rows = out.rows if out.places is None else out.rows[out.places.flatten().long()]
    return rows.view(*ids.shape, rows.shape[1])


def _naive(x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for j, expert in enumerate(ids[token].tolist()):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            out[token, j] = w2[expert].double() @ (F.silu(gate) * up)
    return out.float()


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "experts", "top_k", "favourite", "num_shared"),
    [
        (37, 48, 40, 8, 2, 0.0, 0),
        (1, 33, 17, 5, 3, 0.0, 1),
        (70, 16, 130, 3, 1, 9.0, 2),
        (16, 16, 16, 4, 2, 0.0, 2),
        (17, 16, 16, 4, 2, 0.0, 1),
        (0, 16, 16, 4, 2, 0.0, 1),
    ],
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
    num_shared: int,
) -> None:
    case = _case(num_tokens, hidden, inner, experts, top_k, favourite, num_shared)
    run, device = (moe_experts_triton, kernel_device) if use_kernel else (moe_experts_torch, "cpu")
    got = _by_choice(run(*(tensor.to(device) for tensor in case), num_shared), case[1]).cpu()
    torch.testing.assert_close(got, _naive(*case), rtol=1e-4, atol=1e-5)


def test_kernel_is_the_twin_in_half_precision(kernel_device: str) -> None:
    x, ids, w13, w2 = _case(37, 48, 40, 8, 2, num_shared=1)
    case = (x.to(HALF), ids, w13.to(HALF), w2.to(HALF))
    got = _by_choice(moe_experts_triton(*(tensor.to(kernel_device) for tensor in case), 1), ids).cpu()
    # Gate, up, their product and the second product are each rounded to 8 bits.
    torch.testing.assert_close(got, _by_choice(moe_experts_torch(*case, 1), ids), rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 19, 37, 0])
def test_float8_weights_are_those_values(
    kernel_device: str, num_tokens: int, dtype: torch.dtype, use_kernel: bool
) -> None:
    x, ids, w13, w2 = _case(num_tokens, 48, 40, 8, 2, num_shared=1)
    w2 = w2 * torch.logspace(-2, 2, 48)[:, None]
    held = quantize_rows(w13), quantize_rows(w2)
    want = _naive(x.to(dtype).float(), ids, *(dequantize_rows(part, torch.float32) for part in held))
    run, device = (moe_experts_triton, kernel_device) if use_kernel else (moe_experts_torch, "cpu")
    (w13, scale13), (w2, scale2) = (Float8Weight(*(t.to(device) for t in part)) for part in held)
    out = run(x.to(device, dtype), ids.to(device), w13, w2, 1, ExpertScales(scale13, scale2))
    assert out.rows.dtype == dtype
    # float32 sums, or what is rounded to 8 bits on the way: relative to the size of a column's products
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    error = (_by_choice(out, ids).cpu().float() - want).abs()
    assert (error <= tolerance * (want.abs() + torch.logspace(-2, 2, 48))).all()


def test_float8_activations_beyond_float16_are_cut(kernel_device: str) -> None:
    x = torch.full((1, 16), 200.0, device=kernel_device).bfloat16()
    w13, scale13 = quantize_rows(torch.full((1, 32, 16), 4.0, device=kernel_device))
    w2, scale2 = quantize_rows(torch.full((1, 16, 16), 2**-8, device=kernel_device))
    ids = torch.zeros(1, 1, dtype=torch.int32, device=kernel_device)
    out = moe_experts_triton(x, ids, w13, w2, 0, ExpertScales(scale13, scale2))
    assert torch.allclose(out.rows.float(), torch.tensor(65504 / 16, device=kernel_device), rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]], dtype: torch.dtype
) -> None:
    x, ids, w13, w2 = _case(105, 256, 128, 8, 2, num_shared=1)
    x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
    whole = _by_choice(moe_experts(x, ids, w13, w2, 1), ids)
    for rows in row_subsets(105):
        assert torch.equal(_by_choice(moe_experts(x[rows], ids[rows], w13, w2, 1), ids[rows]), whole[rows])


def test_kernel_rows_alone(kernel_device: str) -> None:
    x, ids, w13, w2 = (tensor.to(kernel_device) for tensor in _case(41, 48, 40, 5, 2, favourite=0.5, num_shared=1))
    whole = _by_choice(moe_experts_triton(x, ids, w13, w2, 1), ids)
    for rows in (slice(0, 1), slice(40, 41), slice(3, 22), slice(7, 41)):
        assert torch.equal(_by_choice(moe_experts_triton(x[rows], ids[rows], w13, w2, 1), ids[rows]), whole[rows])


@pytest.mark.parametrize("by_tma", [False, True])
def test_kernel_with_and_without_tma(kernel_device: str, monkeypatch: pytest.MonkeyPatch, by_tma: bool) -> None:
    monkeypatch.setattr(_grouped_experts, "_TILES", {16: (16, 16, by_tma, 4, 2)})
    case = _case(37, 40, 24, 6, 2, favourite=0.4, num_shared=1)  # columns and inner sizes that no block divides
    got = _by_choice(moe_experts_triton(*(tensor.to(kernel_device) for tensor in case), 1), case[1]).cpu()
    torch.testing.assert_close(got, _naive(*case), rtol=1e-4, atol=1e-5)


def test_placing_scans_in_pieces(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_expert_tiles, "_SCAN", 16)
    case = _case(61, 16, 16, 6, 3, favourite=0.4, num_shared=1)
    got = _by_choice(moe_experts_triton(*(tensor.to(kernel_device) for tensor in case), 1), case[1]).cpu()
    torch.testing.assert_close(got, _naive(*case), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
def test_law_on_the_gpu_in_bfloat16_also_from_a_graph() -> None:
    x, ids, w13, w2 = _case(2500, 2048, 1408, 64, 6, num_shared=2)
    x, ids, w13, w2 = x.cuda().bfloat16(), ids.cuda(), w13.cuda().bfloat16(), w2.cuda().bfloat16()
    whole = _by_choice(moe_experts_triton(x, ids, w13, w2, 2), ids)
    assert torch.equal(_by_choice(moe_experts_sorted(x, ids, w13, w2), ids), whole)
    for size in (1, 2, 4, 16, 17, 64, 129, 300, 700, 800, 1400):
        rows = torch.randperm(2500)[:size].cuda()
        got = _by_choice(moe_experts(x[rows], ids[rows], w13, w2, 2), ids[rows])
        assert torch.equal(got, whole[rows]), size
    for run in (lambda: moe_experts_triton(x, ids, w13, w2, 2), lambda: moe_experts_sorted(x, ids, w13, w2)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        out.rows.fill_(torch.nan)
        graph.replay()
        assert torch.equal(_by_choice(out, ids), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
def test_float8_weights_on_the_gpu_also_from_a_graph() -> None:
    x, ids, w13, w2 = _case(2500, 2048, 1408, 64, 6, num_shared=2)
    x, ids = x.cuda().bfloat16(), ids.cuda()
    (w13, scale13), (w2, scale2) = quantize_rows(w13.cuda()), quantize_rows(w2.cuda())
    scales = ExpertScales(scale13, scale2)
    rounded = [dequantize_rows(Float8Weight(*part), torch.bfloat16) for part in ((w13, scale13), (w2, scale2))]
    for size in (1, 4, 17, 129, 700, 2500):
        few, chosen = x[:size].contiguous(), ids[:size].contiguous()
        out = moe_experts(few, chosen, w13, w2, 2, scales)
        want = moe_experts(few, chosen, *rounded, 2)
        # bfloat16 rounds the weights once more, and what stands between the products
        torch.testing.assert_close(_by_choice(out, chosen), _by_choice(want, chosen), rtol=2**-4, atol=2**-4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = moe_experts(few, chosen, w13, w2, 2, scales)
        again.rows.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again.rows, out.rows), size


def test_wrong_arguments_are_refused() -> None:
    x, ids, w13, w2 = _case(3, 16, 16, 4, 2)
    with pytest.raises(ValueError, match="ids: expected dtype"):
        moe_experts(x, ids.long(), w13, w2)
    with pytest.raises(ValueError, match="w13: expected shape"):
        moe_experts(x, ids, w13[:, :-1], w2)
    with pytest.raises(ValueError, match="contiguous"):
        moe_experts(x, ids, w13.transpose(1, 2).contiguous().transpose(1, 2), w2)
    with pytest.raises(ValueError, match=r"num_shared: expected 0\.\.2, got 3"):
        moe_experts(x, ids, w13, w2, 3)
    scales = ExpertScales(torch.ones(4, 32), torch.ones(4, 16))
    with pytest.raises(ValueError, match="w13: expected dtype"):
        moe_experts(x, ids, w13, w2, 0, scales)
    w13, w2 = quantize_rows(w13).values, quantize_rows(w2).values
    with pytest.raises(ValueError, match=r"scales.w2: expected shape"):
        moe_experts(x, ids, w13, w2, 0, ExpertScales(scales.w13, torch.ones(4, 15)))
