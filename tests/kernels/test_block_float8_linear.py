"""FP8 weights with a scale for each row and 128 columns: values, kernel against twin, and the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels import block_float8_linear as module
from specgen.kernels.block_float8_linear import (
    block_float8_linear,
    block_float8_linear_torch,
    block_float8_linear_triton,
)


def arguments(rows: int, inner: int, columns: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(inner)
    x = torch.randn(rows, inner, generator=g)
    values = (torch.randn(columns, inner, generator=g) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-inner // 128), columns, generator=g) * 0.01 + 0.001
    return x.to(device), values.to(device), scale.to(device)


def naive(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    weight = values.double()
    for n in range(weight.shape[0]):
        for k in range(weight.shape[1]):
            weight[n, k] *= scale[k // 128, n].double()
    return x.double() @ weight.T


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 128, 33), (5, 200, 70), (17, 300, 64), (3, 40, 5)])
def test_values(kernel_device: str, rows: int, inner: int, columns: int) -> None:
    want = naive(*arguments(rows, inner, columns))
    twin = block_float8_linear_torch(*arguments(rows, inner, columns))
    kernel = block_float8_linear_triton(*arguments(rows, inner, columns, kernel_device)).cpu()
    torch.testing.assert_close(twin.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kernel.double(), want, rtol=1e-4, atol=1e-5)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    x, values, scale = arguments(301, 200, 70)
    whole = block_float8_linear(x, values, scale)
    for rows in row_subsets(301):
        assert torch.equal(block_float8_linear(x[rows], values, scale), whole[rows])


def test_a_row_is_the_same_among_any_number_of_rows(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, values, scale = arguments(70, 200, 40, kernel_device)
    if kernel_device == "cuda":
        x, values, scale = arguments(300, 7000, 2112, kernel_device)  # segments by programs, and in loops
        x = x.bfloat16()
    else:  # numpy's products, which the interpreter takes, depend on their shape
        monkeypatch.setattr(module, "_TILES", {64: (64, 4, 4)})
    whole = block_float8_linear_triton(x, values, scale)
    for rows in (slice(0, 1), slice(3, 20), slice(5, 69), slice(1, 70)):
        assert torch.equal(block_float8_linear_triton(x[rows], values, scale), whole[rows])


@pytest.mark.parametrize("inner", [512, 600, 640])  # segments of two blocks: even, cut in a block, cut after one
def test_segments_have_the_same_bits_in_a_loop_and_in_programs(
    kernel_device: str, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEGMENT", 2)
    x, values, scale = arguments(9, inner, 70, kernel_device)
    monkeypatch.setattr(module, "_MANY_PROGRAMS", 0)
    in_a_loop = block_float8_linear_triton(x, values, scale)
    monkeypatch.setattr(module, "_MANY_PROGRAMS", 10**6)
    assert torch.equal(block_float8_linear_triton(x, values, scale), in_a_loop)
    torch.testing.assert_close(in_a_loop.cpu().double(), naive(*arguments(9, inner, 70)), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="instructions of a GPU are meant")
def test_every_number_is_widened_exactly() -> None:
    """Column n of the weight holds number n once: the products with ones are the numbers, in bfloat16's bits."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without NaN
    values = torch.zeros(len(codes), 128, dtype=torch.uint8)
    values[torch.arange(len(codes)), torch.arange(len(codes)) % 128] = codes
    ones = torch.ones(1, 128, dtype=torch.bfloat16)
    scale = torch.ones(1, len(codes))
    out = block_float8_linear(ones.cuda(), values.view(torch.float8_e4m3fn).cuda(), scale.cuda()).cpu()[0]
    assert torch.equal(out, codes.view(torch.float8_e4m3fn).to(torch.bfloat16))


def test_wrong_arguments_are_refused() -> None:
    x, values, scale = arguments(2, 200, 8)
    for args, message in [
        ((x[:, :-1], values, scale), "x: expected shape"),
        ((x, values.float(), scale), "values: expected dtype"),
        ((x, values, scale.T.contiguous()), "scale: expected shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_float8_linear(*args)
    assert block_float8_linear(x[:0], values, scale).shape == (0, 8)
