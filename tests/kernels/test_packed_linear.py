"""Products with packed weights: the weight's own values, and the law, for every number of rows that a call pads to."""

from __future__ import annotations

import pytest
import torch

from specgen.kernels import packed_linear as module
from specgen.kernels.linear import linear
from specgen.kernels.packed_linear import PackedWeight, pack_weight, packed_linear

SHAPES = [(960, 576), (576, 1536), (7, 33), (1, 1), (1001, 130)]
COUNTS = (*range(1, 71), 96, 127, 128, 129, 200, 255, 256, 257, 300, 511)


def packed(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, PackedWeight]:
    """Return a weight and the same one packed."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = pack_weight(weight)
    if found is None:
        pytest.skip("this machine's packed products are not used")
    return weight, found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, held = packed(shape, dtype)
    assert torch.equal(held.plain(), weight)
    x = torch.randn(13, shape[1]).to(dtype)
    exact = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    assert held.shape == shape
    assert (
        (packed_linear(x, held).double() - exact).abs() <= 2.0 ** (-7 if dtype == torch.bfloat16 else -20) * scale
    ).all()
    assert packed_linear(x[:0], held).shape == (0, shape[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_row_bits_do_not_depend_on_the_other_rows(shape: tuple[int, int], threads: int) -> None:
    _, held = packed(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(max(COUNTS), shape[1])
        whole = packed_linear(x, held)
        for count in COUNTS:
            assert torch.equal(packed_linear(x[:count], held), whole[:count]), count
            assert torch.equal(packed_linear(x[-count:], held), whole[-count:]), count
    finally:
        torch.set_num_threads(before)


def test_strided_rows_are_read_as_they_are() -> None:
    _, held = packed((7, 33))
    wide = torch.randn(5, 50)
    assert torch.equal(packed_linear(wide[:, :33], held), packed_linear(wide[:, :33].contiguous(), held))


def test_where_rows_differ_the_plain_product_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, held = packed((7, 33))
    monkeypatch.setattr(module, "_STABLE", {})
    monkeypatch.setattr(PackedWeight, "product", lambda self, x: torch.randn(x.shape[0], self.shape[0]))
    assert pack_weight(weight) is None
    x = torch.randn(3, 33)
    assert torch.equal(packed_linear(x, held), linear(x, weight))


def test_a_wrong_dtype_is_named() -> None:
    _, held = packed((7, 33))
    with pytest.raises(ValueError, match="x: expected dtype"):
        packed_linear(torch.zeros(2, 33, dtype=torch.bfloat16), held)
