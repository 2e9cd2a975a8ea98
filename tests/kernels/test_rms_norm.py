"""RMS norm: transformers' values, the residual, kernel against twin, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from specgen.kernels.rms_norm import (
    combine_norm,
    combine_norm_torch,
    combine_norm_triton,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)

EPS = 1e-6
# Triton's interpreter cuts bfloat16 off instead of rounding it; float16 stands in for it there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twin_is_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 257).to(dtype), torch.randn(5, 257).to(dtype), torch.randn(257).to(dtype)
    reference = DeepseekV3RMSNorm(257, EPS).to(dtype)
    reference.weight.data.copy_(weight)
    assert torch.equal(rms_norm(x, weight, EPS), reference(x))
    want = x + residual
    out, total = rms_norm(x, weight, EPS, residual)
    assert total is residual
    assert torch.equal(total, want)
    assert torch.equal(out, reference(want))


def test_by_hand() -> None:
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_rows", "width"), [(5, 257), (1, 64), (3, 7168), (0, 16)])
def test_kernel_is_the_twin(kernel_device: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, residual, weight = torch.randn(num_rows, width + 5), torch.randn(num_rows, width), torch.randn(width)
    x, residual, weight = x.to(dtype)[:, :width], residual.to(dtype), weight.to(dtype)
    # The sum's order differs: the last float32 bits, which two roundings to bfloat16 turn into two steps of up to 2^-7.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-5.9, "atol": 1e-6}
    device_args = x.to(kernel_device), weight.to(kernel_device), EPS
    torch.testing.assert_close(rms_norm_triton(*device_args).cpu(), rms_norm_torch(x, weight, EPS), **tolerance)
    out, total = rms_norm_triton(*device_args, residual.clone().to(kernel_device))
    want_out, want_total = rms_norm_torch(x, weight, EPS, residual)
    torch.testing.assert_close(out.cpu(), want_out, **tolerance)
    assert torch.equal(total.cpu(), want_total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 96, 256, 577])
def test_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]], dtype: torch.dtype, width: int
) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(301, width + 3).to(dtype), torch.randn(301, width), torch.randn(width).to(dtype)
    residual = residual.to(dtype)
    whole, (whole_sum, _) = rms_norm(x[:, :width], weight, EPS), rms_norm(x[:, :width], weight, EPS, residual.clone())
    for rows in row_subsets(301):
        assert torch.equal(rms_norm(x[rows][:, :width], weight, EPS), whole[rows])
        assert torch.equal(rms_norm(x[rows][:, :width], weight, EPS, residual[rows])[0], whole_sum[rows])


def test_kernel_rows_alone(kernel_device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 130, device=kernel_device), torch.randn(130, device=kernel_device)
    whole = rms_norm_triton(x, weight, EPS)
    assert all(torch.equal(rms_norm_triton(x[i : i + 1], weight, EPS), whole[i : i + 1]) for i in range(9))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="weight: expected shape"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4), EPS)
    with pytest.raises(ValueError, match="residual: expected shape"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3), EPS, torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sorted_rows", [False, True])
def test_combine_norm_is_its_parts(kernel_device: str, dtype: torch.dtype, sorted_rows: bool) -> None:
    torch.manual_seed(0)
    parts, weights = torch.randn(7, 3, 33).to(dtype), torch.rand(7, 3)
    residual, norm_weight = torch.randn(7, 33).to(dtype), torch.randn(33).to(dtype)
    rows, places = parts.view(21, 33), None
    if sorted_rows:
        order = torch.randperm(21)
        places = torch.empty(21, dtype=torch.int32)
        places[order] = torch.arange(21, dtype=torch.int32)
        rows, places = torch.cat([rows[order], torch.full((2, 33), torch.nan).to(dtype)]), places.view(7, 3)
    total = (parts.double() * weights.double()[..., None]).sum(1).to(dtype) + residual
    want = rms_norm_torch(total, norm_weight, 1e-5)
    for run, device in ((combine_norm_torch, "cpu"), (combine_norm_triton, kernel_device)):
        args = [None if t is None else t.clone().to(device) for t in (rows, places, weights, residual, norm_weight)]
        normed, got_total = run(*args, 1e-5)  # type: ignore[arg-type]
        step = 1e-5 if dtype is torch.float32 else 2**-7  # one rounding of the sum, and those behind it
        torch.testing.assert_close(got_total.cpu(), total, rtol=step, atol=step)
        torch.testing.assert_close(normed.cpu(), want, rtol=2 * step, atol=2 * step)


def test_combine_norm_tokens_alone(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    parts, weights, residual = torch.randn(70, 3, 80), torch.rand(70, 3), torch.randn(70, 80)
    norm_weight = torch.ones(80)
    whole = combine_norm(parts.view(210, 80), None, weights, residual.clone(), norm_weight, 1e-5)
    for rows in row_subsets(70):
        got = combine_norm(parts[rows].flatten(0, 1), None, weights[rows], residual[rows], norm_weight, 1e-5)
        assert all(torch.equal(a, b[rows]) for a, b in zip(got, whole, strict=True))


def test_combine_norm_refuses_wrong_arguments() -> None:
    rows, weights, residual, norm_weight = torch.zeros(6, 8), torch.zeros(2, 3), torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="rows: expected shape"):
        combine_norm(rows[:5], None, weights, residual, norm_weight, 1e-5)
    with pytest.raises(ValueError, match="places: expected dtype"):
        combine_norm(rows, torch.zeros(2, 3).long(), weights, residual, norm_weight, 1e-5)
