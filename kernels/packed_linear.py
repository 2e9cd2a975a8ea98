"""Dense products on the CPU with weights in the layout that oneDNN's own kernels read.

A product of few rows is bound by the reading of its weight, and the library behind `linear` copies the weight into
blocks first, in every call. Here that is done once. Measured (AVX-512, float32, one thread, 576 x 49,152): 5.3 ms
against 23 for 1 to 4 rows, 10.4 against 23 for 16, 34 against 57 for 64.

A row's bits don't depend on the others: measured for every count from 1 to 512, with 1 and 2 threads, twenty shapes,
rows are equal for every count from 2 up, and for 1 below 1,024 inner elements. So rows are padded to one of a few
counts, for each of which oneDNN compiles a kernel at its first use, which takes a millisecond; and a self-test at the
first use of a shape and a number of threads goes back to `linear` where rows differ.
"""

from __future__ import annotations

import logging

import torch

from specgen.kernels._checks import check
from specgen.kernels.linear import linear_torch

_COUNTS = (4, 8, 12, 16, 24, 32, 48, 64)  # rows of a call are padded to the next of these
_LARGE_COUNTS = (256, 128)  # whole calls of many rows
_LARGE_CALL = 4 << 30  # FLOPs of a call up to which the large counts are used: the self-test meets each of them
_HINT = 16  # rows that the layout is chosen for; the others read the same one

logger = logging.getLogger(__name__)

_STABLE: dict[tuple[object, ...], bool] = {}


class PackedWeight:
    """A weight `[N, K]` in blocks; `plain` gives it back."""

    __slots__ = ("_blocked", "dtype", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        """Copies `weight [N, K]` on the CPU."""
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _HINT)

    def plain(self) -> torch.Tensor:
        """Return the weight as it was, `[N, K]`."""
        return self._blocked.to_dense()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T in one call of oneDNN."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocked, None, "none", [], "")  # type: ignore[no-any-return]


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """Return the weight `[N, K]` in blocks, or None if this machine's products of it gain nothing or differ by row."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    try:
        packed = PackedWeight(weight)
        return packed if _is_stable(packed) else None
    except (RuntimeError, NotImplementedError) as error:  # a build of torch, or a processor, without them
        logger.info("products with packed weights are not to be had here: %s", str(error).splitlines()[0])
        return None


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return x @ weight.T; a row's bits don't depend on the other rows or their number.

    x: [T, K] of the weight's dtype, on the CPU, rows may be strided. Returns [T, N], contiguous. Raises: ValueError on
    a wrong dtype or shape.
    """
    check("x", x, weight.dtype, None, weight.shape[1])
    if not _is_stable(weight):  # with the number of threads that there is now
        return linear_torch(x, weight.plain())
    return _by_counts(x, weight)


def _by_counts(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    num_rows = x.shape[0]
    if num_rows <= _COUNTS[-1]:
        return _padded(x, weight)
    parts = []
    start = 0
    for count in _large_counts(weight):
        while num_rows - start >= count:
            parts.append(weight.product(x[start : start + count]))
            start += count
    while start < num_rows:
        parts.append(_padded(x[start : start + _COUNTS[-1]], weight))
        start += _COUNTS[-1]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _large_counts(weight: PackedWeight) -> list[int]:
    num_columns, inner = weight.shape
    return [count for count in _LARGE_COUNTS if 2 * count * num_columns * inner <= _LARGE_CALL]


def _padded(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    num_rows = x.shape[0]
    count = next(count for count in _COUNTS if count >= num_rows)
    if count == num_rows:
        return weight.product(x)
    if num_rows <= 1:
        filled = x.expand(count, -1) if num_rows else x.new_zeros(count, x.shape[1])
    else:
        filled = torch.cat([x, x[: count - num_rows]])
    return weight.product(filled)[:num_rows]


def _is_stable(weight: PackedWeight) -> bool:
    """Whether rows keep their bits for this shape and number of threads, tested at the first use."""
    key = (weight.shape, weight.dtype, torch.get_num_threads())
    if key not in _STABLE:
        _STABLE[key] = _rows_keep_bits(weight)
        if not _STABLE[key]:
            logger.info("packed products %s: row bits depend on the other rows here", key)
    return _STABLE[key]


def _rows_keep_bits(weight: PackedWeight) -> bool:
    """Whether rows keep their bits in calls of every count that is used, and at every place."""
    inner = weight.shape[1]
    counts = (*_COUNTS, *_large_counts(weight))
    largest = max(counts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(largest, inner, generator=generator).to(weight.dtype)
    whole = weight.product(x)
    for count in counts:
        if not torch.equal(weight.product(x[:count]), whole[:count]):
            return False
        if not torch.equal(weight.product(x[-count:]), whole[-count:]):
            return False
    same = weight.product(x[:1].expand(_COUNTS[-1], inner).contiguous())
    return torch.equal(same, same[:1].expand_as(same))
