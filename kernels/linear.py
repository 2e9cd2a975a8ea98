"""Dense products whose row bits don't depend on how many rows are in the call.

On CUDA cuBLAS does it, once its workspace is taken away (the worker sets that before the first use). On the CPU the
library picks its kernel by row count: measured (AVX-512, MKL, float32, 1 and 2 threads) rows are equal for every count
from 12 up and others below, in bfloat16 for every count. So rows are padded to a multiple of 16, and a self-test of a
few milliseconds at the first use of a shape falls back to products over one fixed block of rows where that doesn't
hold, and to single rows where even the place in the block matters (seen for odd and tiny shapes, 33 x 7).
"""

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import ask_for, pdl, tl, triton, wait_for_inputs

# Up to so many rows and bytes of weights, on CUDA: a product that asks for its weights while the kernel before it runs.
FEW_ROWS = 16
_FEW_BYTES = 20 << 20
# A tile of the own product: columns, inner columns a step in half precision, warps, stages.
_TILE = (16, 256, 4, 4)

ROW_MULTIPLE = 16
MAX_ROWS = 256  # more rows go in several calls, so that the self-test sees every row count that is ever used
_TEST_COUNTS = (16, 32, 48, 112)
_TEST_ITEMS = (1, 2, 3, 8)

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

logger = logging.getLogger(__name__)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T; a row's bits don't depend on the other rows or their number.

    x: [T, K]; weight: [N, K], same dtype. Returns [T, N], contiguous. Raises: ValueError on a wrong dtype or shape.
    """
    check("x", x, x.dtype, None, None)
    check("weight", weight, x.dtype, None, x.shape[1])
    check_same_device(x=x, weight=weight)
    if not x.is_cuda:
        return linear_torch(x, weight)
    if x.dtype == torch.float32:
        return linear_triton(x, weight, x.dtype)
    if _takes_few_rows(x, weight):
        return linear_triton(x, weight, x.dtype)
    return F.linear(x, weight)


def linear_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what `linear` returns, by the CPU's row-stable form."""
    return _by_rows(x, weight, _mode("linear", weight), F.linear)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, num_columns, x_stride, x_head_stride, out_stride, out_head_stride,
    inner: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    weight_rows = weight_ptr + (head * num_columns + columns) * inner
    if PDL:  # weights are older than the kernel before this one
        in_line: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.minimum(tl.arange(0, LINES) * in_line, inner - 1)
        last = weight_ptr + (head * num_columns + num_columns - 1) * inner
        ask_for(tl.where(columns < num_columns, weight_rows, last)[:, None] + line[None, :])
    wait_for_inputs(PDL)
    x_rows = x_ptr + head * x_head_stride + rows.to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, inner, BLOCK_INNER):
        k = start + tl.arange(0, BLOCK_INNER)
        x = tl.load(x_rows[:, None] + k[None, :], mask=(rows < num_rows)[:, None] & (k < inner)[None, :], other=0.0)
        w_mask = (columns[None, :] < num_columns) & (k[:, None] < inner)
        w = tl.load(weight_rows[None, :] + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    target = out_ptr + head * out_head_stride + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    out_mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def linear_triton(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return x @ weight.T in `out_dtype`, by a fixed tile and one order of the inner sum."""
    out = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    return batched_linear_triton(x[:, None], weight.contiguous()[None], out[:, None])[:, 0]


def batched_linear_triton(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out [T, H, N]`, filled with x[:, h] @ weight[h].T as `linear_triton` does it."""
    (num_rows, num_heads, inner), num_columns = x.shape, weight.shape[1]
    if num_rows:
        columns, step, warps, stages = _TILE
        step = min(step if x.itemsize == 2 else step // 2, max(16, triton.next_power_of_2(inner)))
        _linear_kernel[(triton.cdiv(num_rows, 16), triton.cdiv(num_columns, columns), num_heads)](
            x, weight, out, num_rows, num_columns, *x.stride()[:2], *out.stride()[:2], inner, BLOCK_ROWS=16,
            BLOCK_COLUMNS=columns, BLOCK_INNER=step, LINES=triton.next_power_of_2(triton.cdiv(inner * x.itemsize, 128)),
            num_warps=warps, num_stages=stages, **pdl(),
        )  # fmt: skip
    return out


def _takes_few_rows(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> bool:
    is_small = len(x) <= FEW_ROWS and weight.nbytes <= _FEW_BYTES and x.dtype != torch.float32
    fits = is_small and x.stride(-1) == 1 and weight.is_contiguous() and (out is None or out.stride(-1) == 1)
    return fits and _few_rows_agree(
        tuple(weight.shape), x.stride(), None if out is None else out.stride(), x.dtype, x.device
    )


@functools.cache
def _few_rows_agree(
    weight_shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the few rows' product gives cuBLAS' bits in this shape, which all larger numbers of rows get.

    Strides too, since the library may choose its algorithm by them. `out_strides`: of heads' products, else None.
    """
    generator = torch.Generator(device).manual_seed(0)

    def laid_out(*shape: int, strides: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).normal_(generator=generator)

    weight = torch.randn(weight_shape, generator=generator, device=device, dtype=dtype)
    *heads, num_columns, inner = weight_shape
    x = laid_out(FEW_ROWS + 1, *heads, inner, strides=x_strides)
    if out_strides is None:
        return torch.equal(linear_triton(x[:FEW_ROWS], weight, dtype), F.linear(x, weight)[:FEW_ROWS])
    wanted, got = (laid_out(FEW_ROWS + 1, *heads, num_columns, strides=out_strides) for _ in range(2))
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=wanted.transpose(0, 1))
    batched_linear_triton(x[:FEW_ROWS], weight, got[:FEW_ROWS])
    return torch.equal(got[:FEW_ROWS], wanted[:FEW_ROWS])


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in float32, whatever the inputs' dtype; a row's bits don't depend on the others.

    x: [T, K]; weight: [N, K], same dtype. Returns [T, N] float32. Raises: ValueError on a wrong dtype or shape.
    """
    check("x", x, x.dtype, None, None)
    check("weight", weight, x.dtype, None, x.shape[1])
    check_same_device(x=x, weight=weight)
    return linear_triton(x, weight) if x.is_cuda else linear_torch(x.float(), weight.float())


def linear_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T as float32, for many columns; a row's bits don't depend on the other rows or their number.

    On CUDA the products' own float32 sums, which a pass over them to widen them would only read again; on the CPU
    rounded to the inputs' dtype first. x: [N, K]; weight: [V, K], same dtype. Returns [N, V] float32.
    Raises: ValueError on a wrong dtype or shape.
    """
    check("x", x, x.dtype, None, None)
    check("weight", weight, x.dtype, None, x.shape[1])
    check_same_device(x=x, weight=weight)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()


def batched_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x[:, h] @ weight[h].T for every head h; a row's bits don't depend on the other rows or their number.

    x: [T, H, K], rows and heads may be strided; weight: [H, N, K], same dtype. Returns [T, H, N], contiguous, or `out`
    of that shape, whose rows and heads may be strided. Raises: ValueError on a wrong dtype or shape.
    """
    check("x", x, x.dtype, None, None, None)
    check("weight", weight, x.dtype, x.shape[1], None, x.shape[2])
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[1])
    check("out", out, x.dtype, x.shape[0], weight.shape[0], weight.shape[1])
    check_same_device(x=x, weight=weight, out=out)
    if x.is_cuda and _takes_few_rows(x, weight, out):
        return batched_linear_triton(x, weight, out)
    if x.is_cuda:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
    return out.copy_(batched_linear_torch(x, weight))


def batched_linear_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what `batched_linear` returns, by the CPU's row-stable form."""
    return _by_rows(x, weight, _mode("batched_linear", weight), _per_head)


def item_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a[i] @ b[i] for every i on the CPU; an item's bits don't depend on the other items or their number.

    a: [n, M, K] contiguous, b: [n, K, N]. Returns [n, M, N].
    """
    if _items_are_stable(a.shape[1], a.shape[2], b.shape[2], b.stride(-1) == 1, a.dtype, torch.get_num_threads()):
        return torch.bmm(a, b)
    return torch.cat([torch.bmm(a[i : i + 1], b[i : i + 1]) for i in range(a.shape[0])])


def rows_keep_bits(rows: int, inner: int, columns: int, transposed: bool, dtype: torch.dtype) -> bool:
    """Whether a row of `item_product`'s left operand gives the same bits wherever it stands in its item."""
    return _items_are_stable(rows, inner, columns, not transposed, dtype, torch.get_num_threads())


def rows_agree(rows: int, of: int, inner: int, columns: int, transposed: bool, dtype: torch.dtype) -> bool:
    """Whether `rows` rows give the same bits in an item of their own as in `item_product`'s items of `of` rows."""
    return _items_agree(rows, of, inner, columns, not transposed, dtype, torch.get_num_threads())


def cpu_linear_mode() -> str:
    """Return how the CPU's products have been made so far, for logs: `direct`, `blocked`, `single` or `mixed`."""
    modes = set(_MODES.values())
    return modes.pop() if len(modes) == 1 else ("mixed" if modes else "direct")


_MODES: dict[tuple[object, ...], str] = {}


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[1])
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _by_rows(x: torch.Tensor, weight: torch.Tensor, mode: str, product: _Product) -> torch.Tensor:
    """Return the product of all rows, in the calls that the mode allows."""
    num_rows = x.shape[0]
    if mode == "single" and num_rows:
        return torch.cat([product(row.clone(), weight) for row in x.split(1)])  # a clone: alignment may matter too
    padding = -num_rows % ROW_MULTIPLE
    if padding or num_rows == 0:
        x = torch.cat([x, x.new_zeros(padding or ROW_MULTIPLE, *x.shape[1:])])
    step = MAX_ROWS if mode == "direct" else ROW_MULTIPLE
    if x.shape[0] <= step:
        return product(x, weight)[:num_rows]
    return torch.cat([product(rows, weight) for rows in x.split(step)])[:num_rows]


def _mode(op: str, weight: torch.Tensor) -> str:
    """Return the fastest form that keeps row bits for this shape, tested at its first use."""
    key = (op, *weight.shape, weight.dtype, torch.get_num_threads())
    if key not in _MODES:
        product = F.linear if op == "linear" else _per_head
        _MODES[key] = _test_rows(product, tuple(weight.shape), weight.dtype)
        if _MODES[key] != "direct":
            logger.info("%s %s: row bits depend on the other rows here; taking the %s form", op, key[1:], _MODES[key])
    return _MODES[key]


def _test_rows(product: _Product, weight_shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return `direct` if rows keep their bits in calls of several sizes and at every place, else what still holds."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(weight_shape, generator=generator).to(dtype)
    x = torch.randn(MAX_ROWS, *weight_shape[:-2], weight_shape[-1], generator=generator).to(dtype)
    same_rows = x[:1].expand_as(x).contiguous()

    def place_is_free(count: int) -> bool:
        out = product(same_rows[:count], weight)
        return torch.equal(out, out[:1].expand_as(out))

    if not place_is_free(ROW_MULTIPLE):
        return "single"
    whole = product(x, weight)
    counts_agree = all(
        torch.equal(product(x[:count], weight), whole[:count])
        and torch.equal(product(x[-count:], weight), whole[-count:])
        for count in _TEST_COUNTS
    )
    return "direct" if counts_agree and place_is_free(MAX_ROWS) else "blocked"


@functools.cache
def _items_are_stable(rows: int, inner: int, columns: int, plain: bool, dtype: torch.dtype, threads: int) -> bool:
    """Whether an item of a batched product keeps its bits in other batches, and a row in other places of its item."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(max(_TEST_ITEMS) + 5, rows, inner, generator=generator).to(dtype)
    b_shape = (inner, columns) if plain else (columns, inner)
    b = torch.randn(a.shape[0], *b_shape, generator=generator).to(dtype)
    b = b if plain else b.transpose(1, 2)
    whole = torch.bmm(a, b)
    counts = all(torch.equal(torch.bmm(a[2 : 2 + n], b[2 : 2 + n]), whole[2 : 2 + n]) for n in _TEST_ITEMS)
    places = all(torch.equal(torch.bmm(a.roll(r, 1), b), whole.roll(r, 1)) for r in {1, rows // 2, rows - 1})
    return counts and places


@functools.cache
def _items_agree(rows: int, of: int, inner: int, columns: int, plain: bool, dtype: torch.dtype, threads: int) -> bool:
    """Whether items of `rows` rows have the bits of the first rows of items of `of` rows, in batches of any size."""
    if not all(_items_are_stable(n, inner, columns, plain, dtype, threads) for n in (rows, of)):
        return False
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(max(_TEST_ITEMS), of, inner, generator=generator).to(dtype)
    b_shape = (inner, columns) if plain else (columns, inner)
    b = torch.randn(a.shape[0], *b_shape, generator=generator).to(dtype)
    b = b if plain else b.transpose(1, 2)
    short = a[:, :rows].contiguous()
    return all(torch.equal(torch.bmm(short[:n], b[:n]), torch.bmm(a[:n], b[:n])[:, :rows]) for n in _TEST_ITEMS)
