"""What is read soon is asked for while memory has little to do: hints that bring it into the second-level cache.

A step of few tokens is bound by the reading of weights, and between its products it reads little: norms, routing,
attention over short contexts. A kernel there gets programs beside its own that ask for the weights of the products
behind it. No result depends on it.
"""

# mypy: ignore-errors

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.kernels._triton import pdl, tl, triton

_BYTES = 24 << 20  # of the weights behind one kernel: what is asked for earlier than that may be gone when it is read
_FEW_TOKENS = 256  # with more, attention keeps the memory busy
_PROGRAMS = 128


class Ahead(NamedTuple):
    """Weights that are read behind a kernel: `ranges [n, 2] int64`, address and bytes, and what lies there."""

    ranges: torch.Tensor
    weights: tuple[torch.Tensor, ...]


def reads_ahead(weights: Sequence[torch.Tensor]) -> Ahead | None:
    """Return what asks for `weights`, contiguous ones in the order in which they are read; None on other devices."""
    ranges, left = [], _BYTES
    for weight in weights:
        size = min(weight.numel() * weight.itemsize, left) // 16 * 16
        if weight.is_cuda and size > 0 and weight.data_ptr() % 16 == 0:
            ranges.append((weight.data_ptr(), size))
            left -= size
    if not ranges or not pdl()["PDL"]:
        return None
    return Ahead(torch.tensor(ranges, dtype=torch.int64, device=weights[0].device), tuple(weights))


def ahead_programs(ahead: Ahead | None, num_tokens: int, groups: int = 1) -> tuple[int, int]:
    """Return how many rows of `groups` programs to launch behind the kernel's own, and how many ranges they ask for."""
    return (-(-_PROGRAMS // groups), len(ahead.ranges)) if ahead is not None and num_tokens <= _FEW_TOKENS else (0, 0)


@triton.jit
def ask_ahead(ranges_ptr, program, num_programs, RANGES: tl.constexpr):
    """Ask for one of `num_programs` parts of all ranges."""
    CHUNK: tl.constexpr = 1024
    LANES: tl.constexpr = 128
    lane = tl.arange(0, LANES)
    for i in tl.static_range(RANGES):
        address = tl.load(ranges_ptr + 2 * i)
        size = tl.load(ranges_ptr + 2 * i + 1).to(tl.int32)
        for start in range(program * (LANES * CHUNK), size, num_programs * (LANES * CHUNK)):
            at = start + lane * CHUNK
            count = tl.minimum(tl.maximum(size - at, 0), CHUNK)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [address + at, count], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
