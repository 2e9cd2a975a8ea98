"""The gated activation: values, kernel against twin, the law (where torch's own silu breaks it)."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from specgen.kernels.silu_mul import silu_mul, silu_mul_torch, silu_mul_triton


def test_values_and_extremes() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 66) * 4
    torch.testing.assert_close(silu_mul(x), (F.silu(x[:, :33].double()) * x[:, 33:].double()).float())
    extremes = torch.tensor([[0.0, 200.0, -200.0, 1e-30, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(extremes), torch.tensor([[0.0, 200.0, 0.0, 5e-31]]), atol=1e-38, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "half"), [(5, 33), (3, 1408), (0, 4)])
def test_kernel_is_the_twin(kernel_device: str, dtype: torch.dtype, num_rows: int, half: int) -> None:
    torch.manual_seed(half)
    x = (torch.randn(num_rows, 2 * half) * 3).to(dtype)
    # Another exponential and division: the last float32 bits, or one step of bfloat16.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(silu_mul_triton(x.to(kernel_device)).cpu(), silu_mul_torch(x), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [128, 704, 33])
def test_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]], dtype: torch.dtype, half: int
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(301, 2 * half) * 3).to(dtype)
    whole = silu_mul(x)
    for rows in row_subsets(301):
        assert torch.equal(silu_mul(x[rows]), whole[rows])


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even number of columns"):
        silu_mul(torch.zeros(2, 3))
