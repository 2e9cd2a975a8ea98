"""Products by row: values, the law by brute force, the self-test and its fallback."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels import linear as linear_module
from specgen.kernels.linear import (
    batched_linear,
    cpu_linear_mode,
    item_product,
    linear,
    linear_float32,
    linear_logits,
    linear_triton,
)
from specgen.worker.config import make_products_exact

Subsets = Callable[[int], Iterator[torch.Tensor]]


@pytest.fixture(params=["as measured", "blocked", "single"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode this machine's self-test picks, and the fallbacks."""
    monkeypatch.setattr(linear_module, "_MODES", {})
    if request.param != "as measured":
        monkeypatch.setattr(linear_module, "_test_rows", lambda *_: request.param)
    return str(request.param)


def test_values(mode: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 3, 20), torch.randn(3, 9, 20)
    torch.testing.assert_close(linear(x[:, 0], weight[0]), (x[:, 0].double() @ weight[0].double().T).float())
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double()).float()
    got = batched_linear(x, weight)
    torch.testing.assert_close(got, want)
    assert got.is_contiguous()
    assert mode in (cpu_linear_mode(), "as measured")


def test_no_rows(mode: str) -> None:
    assert linear(torch.zeros(0, 4), torch.zeros(5, 4)).shape == (0, 5)
    assert batched_linear(torch.zeros(0, 2, 4), torch.zeros(2, 5, 4)).shape == (0, 2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(256, 96), (704, 256), (256, 8), (33, 7)])
def test_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Subsets, dtype: torch.dtype, inner: int, columns: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(301, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    whole = linear(x, weight)
    for rows in row_subsets(301):
        assert torch.equal(linear(x[rows], weight), whole[rows])


@pytest.mark.parametrize(("heads", "inner", "columns"), [(4, 32, 64), (4, 64, 32), (3, 5, 7)])
def test_a_row_alone_is_the_row_in_company_by_head(
    threads: int, row_subsets: Subsets, heads: int, inner: int, columns: int
) -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(301, heads, inner + 3), torch.randn(heads, columns, inner)
    whole = batched_linear(wide[..., :inner], weight)
    for rows in row_subsets(301):
        assert torch.equal(batched_linear(wide[rows][..., :inner], weight), whole[rows])


def test_the_law_holds_in_every_mode(mode: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(99, 2, 64), torch.randn(2, 96, 64)
    whole, whole_by_head = linear(x[:, 0], weight[0]), batched_linear(x, weight)
    for size in (1, 2, 3, 5, 16, 17, 40):
        assert torch.equal(linear(x[7 : 7 + size, 0], weight[0]), whole[7 : 7 + size])
        assert torch.equal(batched_linear(x[7 : 7 + size], weight), whole_by_head[7 : 7 + size])


def test_many_rows_are_the_rows_of_few() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2051, 256), torch.randn(80, 256)
    whole = linear(x, weight)
    assert all(torch.equal(linear(x[i : i + 3], weight), whole[i : i + 3]) for i in range(0, 2048, 97))


@pytest.mark.parametrize("stable", [True, False])
def test_an_item_alone_is_the_item_in_company(threads: int, monkeypatch: pytest.MonkeyPatch, stable: bool) -> None:
    if not stable:
        monkeypatch.setattr(linear_module, "_items_are_stable", lambda *_: False)
    torch.manual_seed(0)
    a, b = torch.randn(70, 16, 80), torch.randn(70, 128, 80).transpose(1, 2)
    whole = item_product(a, b)
    torch.testing.assert_close(whole, (a.double() @ b.double()).float())
    for size in range(1, 70):
        assert torch.equal(item_product(a[:size], b[:size]), whole[:size])
        assert torch.equal(item_product(a[:size], b[:1].expand(size, -1, -1))[:1], whole[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLAS is meant")
def test_rows_on_the_gpu_keep_their_values() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 4, 256).cuda().bfloat16(), torch.randn(4, 96, 256).cuda().bfloat16()
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    # One rounding to bfloat16 (2^-9 of the value) and sums of 256 products.
    torch.testing.assert_close(batched_linear(x, weight).double(), want, rtol=2**-8, atol=2**-6)
    assert batched_linear(x, weight).is_contiguous()


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 32, 70), (13, 16, 64), (16, 128, 9), (21, 256, 64), (60, 32, 9)]
)
def test_few_rows_by_heads(
    kernel_device: str, rows: int, inner: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows == 60:  # one tile, where programs are enough
        monkeypatch.setattr(linear_module, "_LEAST_BATCHED_PROGRAMS", 1)
    torch.manual_seed(0)
    x = torch.randn(rows, 3, inner + 8).half()[..., :inner].to(kernel_device)  # strided, as parts of rows are
    weight = torch.randn(3, columns, inner).half().to(kernel_device)
    out = torch.full((rows, 3, columns + 8), torch.nan).half().to(kernel_device)
    linear_module._few_batched(x, weight, out[..., :columns])
    want = torch.einsum("thk,hnk->thn", x.double().cpu(), weight.double().cpu())
    torch.testing.assert_close(out[..., :columns].double().cpu(), want, rtol=2**-10, atol=2**-7)
    assert out[..., columns:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic is meant")
@pytest.mark.parametrize(("heads", "columns", "inner"), [(16, 512, 128), (16, 128, 512), (128, 128, 512), (9, 96, 64)])
def test_rows_by_heads_are_the_same_in_any_number_on_the_gpu(heads: int, columns: int, inner: int) -> None:
    make_products_exact()
    torch.manual_seed(0)
    weight = torch.randn(heads, columns, inner, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2048, heads, inner, device="cuda", dtype=torch.bfloat16)
    whole = batched_linear(x, weight)
    for rows in [*range(1, 36), 63, 64, 65, 128, 129, 255, 512, 1000, 2047]:
        assert torch.equal(batched_linear(x[:rows], weight), whole[:rows]), rows
    for first in range(0, 2032, 16):
        assert torch.equal(batched_linear(x[first : first + 16], weight), whole[first : first + 16]), first


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="weight: expected shape"):
        linear(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="weight: expected dtype"):
        batched_linear(torch.zeros(2, 3, 4), torch.zeros(3, 5, 4, dtype=torch.bfloat16))


def test_kernel_is_the_product_and_keeps_rows(kernel_device: str, row_subsets: Subsets) -> None:
    """The routers' float32 product on CUDA: odd sizes, and a row alone is the row in company."""
    torch.manual_seed(0)
    wide = torch.randn(70, 90, device=kernel_device)
    x, weight = wide[:, :77], torch.randn(33, 77, device=kernel_device)
    whole = linear_triton(x, weight)
    torch.testing.assert_close(whole, (x.double() @ weight.double().T).float())
    for rows in list(row_subsets(70))[::9]:
        assert torch.equal(linear_triton(x[rows.to(kernel_device)], weight), whole[rows.to(kernel_device)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLAS is meant")
@pytest.mark.parametrize(
    ("columns", "inner"),
    [
        (129280, 2048),
        (3648, 2048),
        (2048, 2048),
        (22528, 2048),
        (2048, 11264),
        (4096, 7168),
        (152064, 3584),
        (512, 128),
    ],
)
def test_the_law_on_the_gpu_in_bfloat16(columns: int, inner: int) -> None:
    """Every product's rows are the same for 1 to 2048 rows, and a head's float32 logits round to them."""
    make_products_exact()
    torch.manual_seed(0)
    weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2048, inner, device="cuda", dtype=torch.bfloat16)
    whole, logits = linear(x, weight), linear_logits(x, weight)
    assert torch.equal(logits.bfloat16(), whole)
    for rows in [*range(1, 40), 48, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300, 512, 777, 1024, 1500, 2047]:
        assert torch.equal(linear(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(linear_logits(x[:rows], weight), logits[:rows]), rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor-core arithmetic is meant")
@pytest.mark.parametrize(("columns", "inner"), [(64, 2048), (256, 7168), (160, 5120), (8, 64)])
def test_a_router_s_rows_are_the_same_in_tiles_of_any_size(columns: int, inner: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, inner, device="cuda", dtype=torch.bfloat16)
    whole = linear_float32(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-2)
    for rows in (1, 4, 16, 17, 64, 128, 255, 256, 257, 512, 2047, 2048, 2049, 4095):
        assert torch.equal(linear_float32(x[:rows], weight), whole[:rows]), rows
