"""Products with FP8 weights: rounding, kernel = twin = a plain product, and rows that keep their bits."""

from __future__ import annotations

import pytest
import torch

from specgen.kernels.float8_linear import (
    FLOAT8,
    Float8Weight,
    dequantize_rows,
    float8_linear,
    float8_linear_torch,
    float8_linear_triton,
    narrow,
    quantize_rows,
)

# Operands are rounded alike on both sides; what differs is the order of float32 sums of up to 200 products of size 1,
# and for a result in half precision its last bit.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def weight_of(columns: int, inner: int, seed: int = 0, device: str = "cpu") -> Float8Weight:
    weight = torch.randn(columns, inner, generator=torch.Generator().manual_seed(seed))
    return quantize_rows((weight * torch.logspace(-3, 3, columns)[:, None]).to(device))


def test_a_row_is_rounded_by_its_own_scale() -> None:
    weight = torch.tensor([[448.0, -1.0, 0.5, 2**-9], [0.0, 0.0, 0.0, 0.0], [7e-5, 3.5e-5, -7e-5, 1e-9]])
    values, scale = quantize_rows(weight)
    assert values.dtype == FLOAT8 and scale.tolist()[:2] == [1.0, 1.0]
    assert values.float().tolist()[0] == [448.0, -1.0, 0.5, 2**-9]
    assert values.float()[2].tolist() == [448.0, 224.0, -448.0, 3 * 2**-9]
    assert torch.equal(dequantize_rows(Float8Weight(values, scale), torch.float32)[:2], weight[:2])


def test_an_element_is_off_by_a_sixteenth_at_most_and_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(1))
    rounded = quantize_rows(weight)
    back = dequantize_rows(rounded, torch.float32)
    # 3 bits behind the point; below 2^-6 of FP8's own numbers (which are scaled by about 448 / 3) steps are equal
    assert ((back - weight).abs() <= weight.abs() / 16 * 1.001 + 2**-10 * rounded.scale.unsqueeze(-1)).all()
    monkeypatch.setattr("specgen.kernels.float8_linear._CHUNK_ELEMENTS", 120)
    again = quantize_rows(weight)
    assert torch.equal(again.values.view(torch.uint8), rounded.values.view(torch.uint8))
    assert torch.equal(again.scale, rounded.scale)


@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(1, 33, 48), (5, 70, 200), (17, 16, 33), (33, 130, 64), (70, 40, 16)]
)
def test_kernel_and_twin_agree(
    kernel_device: str, rows: int, columns: int, inner: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    weight = weight_of(columns, inner, device=kernel_device)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(2)).to(kernel_device, dtype)
    # the twin rounds the weights to x's dtype, the kernel doesn't: compare with the product of the rounded values
    want = (x.double() @ dequantize_rows(weight, torch.float32).double().T).cpu()
    bound = weight.scale.cpu().double() * 448  # the size of a row's largest product
    for out in (
        float8_linear_triton(x, weight, out_dtype),
        float8_linear_torch(x.cpu().float(), Float8Weight(*(t.cpu() for t in weight)), out_dtype),
    ):
        assert out.dtype == out_dtype and out.shape == (rows, columns)
        error = (out.cpu().double() - want).abs()
        assert (error <= TOLERANCE[out_dtype] * (bound + want.abs())).all()


def test_float32_is_multiplied_in_float32(kernel_device: str) -> None:
    weight = weight_of(19, 40, device=kernel_device)
    x = torch.randn(3, 40, device=kernel_device)
    want = x.double() @ dequantize_rows(weight, torch.float32).double().T
    assert ((float8_linear_triton(x, weight, torch.float32) - want).abs() <= 1e-5 * 448 * weight.scale).all()


@pytest.mark.parametrize("columns", [20, 100])
def test_wide_and_slim_tiles_agree(kernel_device: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(columns, 70, device=kernel_device)
    x = torch.randn(2, 70, device=kernel_device).bfloat16()
    slim = float8_linear_triton(x, weight, torch.float32)
    monkeypatch.setattr("specgen.kernels.float8_linear._MANY_PROGRAMS", 0)
    wide = float8_linear_triton(x, weight, torch.float32)
    assert (slim - wide).abs().max() <= 1e-4 * 448 * weight.scale.max()


def test_rows_keep_their_bits_within_a_tile(kernel_device: str) -> None:
    weight = weight_of(24, 33, device=kernel_device)
    x = torch.randn(16, 33, device=kernel_device).bfloat16()
    whole = float8_linear(x, weight)
    for n in (1, 2, 7, 16):
        assert torch.equal(float8_linear(x[:n].contiguous(), weight), whole[:n])


def test_float16_has_room_for_all_of_bfloat16(kernel_device: str) -> None:
    x = torch.tensor([[1.5, -3e38, float("inf"), 65280.0, 0.0]]).to(kernel_device, torch.bfloat16)
    assert narrow(x).tolist() == [[1.5, -65504.0, 65504.0, 65280.0, 0.0]]


def test_no_rows_and_wrong_arguments() -> None:
    weight = weight_of(8, 16)
    assert float8_linear(torch.empty(0, 16), weight).shape == (0, 8)
    with pytest.raises(ValueError, match="x"):
        float8_linear(torch.empty(2, 15), weight)
    with pytest.raises(ValueError, match="scale"):
        float8_linear(torch.empty(2, 16), Float8Weight(weight.values, weight.scale[:7]))
    with pytest.raises(ValueError, match="values"):
        float8_linear(torch.empty(2, 16), Float8Weight(weight.values.float(), weight.scale))
    with pytest.raises(ValueError, match="contiguous"):
        float8_linear(torch.empty(16, 2).T, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic and graphs are meant")
@pytest.mark.parametrize(("columns", "inner"), [(129280, 2048), (2048, 4096), (3648, 2048), (24576, 4096)])
def test_real_sizes_on_the_gpu_also_from_a_graph(columns: int, inner: int) -> None:
    weight = weight_of(columns, inner, device="cuda")
    held = dequantize_rows(weight, torch.float32)
    for rows in (1, 4, 16, 17, 32, 64, 150):
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        out = float8_linear(x, weight, torch.float32)
        want = x.float() @ held.T
        # float32 sums of `inner` products of the size of a column's largest weight
        assert ((out - want).abs() <= 1e-4 * inner**0.5 * 448 * weight.scale).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = float8_linear(x, weight, torch.float32)
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, out)
