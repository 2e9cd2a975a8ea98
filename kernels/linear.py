"""Dense products whose row bits don't depend on how many rows are in the call.

On CUDA cuBLAS does it, once its workspace is taken away (the worker sets that before the first use); few rows go
through kernels of their own, to the same bits. On the CPU the library picks its kernel by row count: measured (AVX-512,
MKL, float32, 1 and 2 threads) rows are equal for every count from 12 up and others below, in bfloat16 for every count.
So rows are padded to a multiple of 16, and a self-test of a few milliseconds at the first use
of a shape falls back to products over one fixed block of rows where that doesn't hold, and to single rows where even
the place in the block matters (seen for odd and tiny shapes, 33 x 7).
"""

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._few_rows_hopper import few_rows_hopper_kernel
from specgen.kernels._triton import (
    can_use_tma,
    hopper_descriptor,
    is_hopper,
    launched,
    pdl,
    start_next_and_wait,
    tl,
    triton,
    wait_for_inputs,
)

ROW_MULTIPLE = 16
MAX_ROWS = 256  # more rows go in several calls, so that the self-test sees every row count that is ever used
# Tiles of the Triton product: rows, columns, inner, stages.
_FEW_ROWS = 2048
_FLOAT32_TILE = (16, 16, 128, 4)
_FEW_TILE = (16, 32, 512, 3)
_MANY_TILE = (64, 64, 128, 4)
# Of a dense product of few rows on Hopper: rows, the tile's columns, inner and stages, programs of one wave.
_FEW_DENSE_ROWS = 16
_DENSE_TILE = (64, 256, 5)
_DENSE_PROGRAMS = 132
# Of a product by heads for few rows: the most of them, and those up to which the whole inner dimension is one step; a
# tile's columns, and the inner step for more rows. With too few programs, rows are shared out; with too many, the
# library is as fast for all but the fewest rows.
_FEW_BATCHED_ROWS, _WHOLE_BATCHED_ROWS = 64, 16
_BATCHED_COLUMNS, _BATCHED_STEP = 64, 128
_LEAST_BATCHED_PROGRAMS, _MOST_BATCHED_PROGRAMS = 96, 264
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
        return linear_triton(x, weight)
    few = _few_rows(x, weight, x.dtype)
    return F.linear(x, weight) if few is None else few


def _are_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is one wave of few rows' programs on Hopper."""
    is_small = 0 < len(x) <= _FEW_DENSE_ROWS and len(weight) <= _DENSE_TILE[0] * _DENSE_PROGRAMS
    return is_small and x.dtype == torch.bfloat16 and is_hopper() and can_use_tma(x, weight)


def _few_rows(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the product of few rows in `dtype`, with the bits of any other form; None if this form is not for it.

    See `_few_rows_hopper`. The weight is read before the kernel waits for its inputs: see `wait_for_inputs`.
    """
    if not _are_few_rows(x, weight):
        return None
    (num_rows, inner), (columns, step, stages) = x.shape, _DENSE_TILE
    out = torch.empty(num_rows, len(weight), dtype=dtype, device=x.device)
    rows = 8 if num_rows <= 8 else _FEW_DENSE_ROWS
    launch = functools.partial(
        few_rows_hopper_kernel[(triton.cdiv(len(weight), columns),)],
        hopper_descriptor(weight, [columns, step]), hopper_descriptor(x, [rows, step]), out, num_rows, len(weight),
        inner, STAGES=stages, num_warps=4, **pdl(),
    )  # fmt: skip
    return out if launched("dense products of few rows", launch) else None


def linear_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what `linear` returns, by the CPU's row-stable form."""
    return _by_rows(x, weight, _mode("linear", weight), F.linear)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, num_columns, x_stride, inner: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, inner, BLOCK_INNER):
        k = start + tl.arange(0, BLOCK_INNER)
        x_mask = (rows[:, None] < num_rows) & (k[None, :] < inner)
        x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_stride + k[None, :], mask=x_mask, other=0.0)
        w_mask = (columns[None, :] < num_columns) & (k[:, None] < inner)
        w = tl.load(weight_ptr + columns[None, :].to(tl.int64) * inner + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out_mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :], acc, mask=out_mask)


def linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what `linear_float32` returns, by tiles that all sum in one order."""
    weight = weight.contiguous()
    num_rows, num_columns = x.shape[0], weight.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=x.device)
    if x.dtype.itemsize > 2:
        rows, columns, inner, stages = _FLOAT32_TILE
    else:
        rows, columns, inner, stages = _FEW_TILE if num_rows <= _FEW_ROWS else _MANY_TILE
    if num_rows:
        _linear_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))](
            x, weight, out, num_rows, num_columns, x.stride(0), weight.shape[1], BLOCK_ROWS=rows, BLOCK_COLUMNS=columns,
            BLOCK_INNER=inner, num_warps=4, num_stages=stages, **pdl(),
        )  # fmt: skip
    return out


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in float32, whatever the inputs' dtype; a row's bits don't depend on the others.

    x: [T, K]; weight: [N, K], same dtype. Returns [T, N] float32. Raises: ValueError on a wrong dtype or shape.
    """
    check("x", x, x.dtype, None, None)
    check("weight", weight, x.dtype, None, x.shape[1])
    check_same_device(x=x, weight=weight)
    if not x.is_cuda:
        return linear_torch(x.float(), weight.float())
    few = _few_rows(x, weight, torch.float32)
    return linear_triton(x, weight) if few is None else few


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
    if not x.is_cuda:
        return out.copy_(batched_linear_torch(x, weight))
    if _are_few_by_heads(x, weight):
        return _few_batched(x, weight, out)
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _are_few_by_heads(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `_few_batched` is for this product: where its bits were found to be cuBLAS's, in bfloat16 on Hopper."""
    num_heads, num_columns, inner = weight.shape
    fits = inner & (inner - 1) == 0 and 16 <= inner <= 512 and weight.is_contiguous()
    num_programs = num_heads * triton.cdiv(num_columns, _BATCHED_COLUMNS)
    most = _FEW_BATCHED_ROWS if num_programs <= _MOST_BATCHED_PROGRAMS else _WHOLE_BATCHED_ROWS
    return len(x) <= most and fits and x.dtype == torch.bfloat16 and is_hopper()


def _few_batched(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Do what `batched_linear` does for few rows: a head's weight, or its first part, is on its way before x is known.

    So no kernel just before this one may have written the weight: see `wait_for_inputs`.
    """
    num_heads, num_columns, inner = weight.shape
    tiles = triton.cdiv(num_columns, _BATCHED_COLUMNS)
    rows = triton.next_power_of_2(max(_WHOLE_BATCHED_ROWS, len(x)))
    while rows > 32 and num_heads * tiles * triton.cdiv(len(x), rows) < _LEAST_BATCHED_PROGRAMS:
        rows //= 2
    _batched_linear_kernel[(num_heads, tiles, triton.cdiv(len(x), rows))](
        x, x.stride(0), x.stride(1), weight, out, out.stride(0), out.stride(1), len(x), num_columns, INNER=inner,
        STEP=inner if rows == _WHOLE_BATCHED_ROWS else min(inner, _BATCHED_STEP), ROWS=rows,
        COLUMNS=_BATCHED_COLUMNS, num_warps=4, **pdl(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _batched_linear_kernel(
    x_ptr,
    x_stride,
    x_head_stride,
    weight_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, head] = weight[head] @ x[row, head]. The weight stands on the left, as in the library's own kernels."""
    head = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    weight_rows = weight_ptr + (head * num_columns + columns).to(tl.int64)[:, None] * INNER + k[None, :]
    weight = tl.load(weight_rows, mask=(columns < num_columns)[:, None], other=0.0)
    start_next_and_wait(PDL)
    x_rows = x_ptr + rows[None, :].to(tl.int64) * x_stride + head * x_head_stride + k[:, None]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.static_range(0, INNER, STEP):
        x = tl.load(x_rows + start, mask=(rows < num_rows)[None, :], other=0.0)
        if start > 0:
            weight = tl.load(weight_rows + start, mask=(columns < num_columns)[:, None], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    target = out_ptr + rows[None, :].to(tl.int64) * out_stride + head * out_head_stride + columns[:, None]
    mask = (rows < num_rows)[None, :] & (columns < num_columns)[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
