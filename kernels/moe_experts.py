"""The experts of a mixture layer: grouped gate-up product, gated activation, grouped down product.

It knows which expert each token chose, not why, and has two forms on a GPU with the same bits: tiles that gather their
rows (`_grouped_experts`), and, for many tokens, and on Hopper for more than one tile holds, rows that are sorted by
expert first (`_sorted_experts`). A row's bits don't depend on its company: products keep row bits (`linear`). Experts
that every token takes (shared ones) are the last.

Weights may be held in FP8 with a scale a row (`float8_linear`), as those of draft layers. They go through the tiles
whatever the number of tokens: sorted rows are for the many layers that do not draft.
"""

from typing import NamedTuple

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._grouped_experts import FEW_TOKENS, grouped_products
from specgen.kernels._sorted_experts import roomy_height, sort_pairs, sorted_products
from specgen.kernels._triton import can_use_tma, is_hopper
from specgen.kernels.float8_linear import FLOAT8, Float8Weight, dequantize_rows
from specgen.kernels.linear import ROW_MULTIPLE, linear_torch
from specgen.kernels.silu_mul import silu_mul_torch

_MANY_TOKENS = 1024  # from so many on rows are sorted, where TMA loads blocks; on Hopper from more than a tile holds


class ExpertScales(NamedTuple):
    """Scales of FP8 weights, one a row: `w13 [E, 2 I] float32`, `w2 [E, H] float32`."""

    w13: torch.Tensor
    w2: torch.Tensor


class ExpertRows(NamedTuple):
    """What the experts made of the tokens: choice j of token t is `rows[places[t, j]]`, or row t * k + j without."""

    rows: torch.Tensor
    places: torch.Tensor | None


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return w2[e] @ silu_mul(w13[e] @ x) of every token and each of its experts e.

    x: [T, H], contiguous; ids: [T, k] int32 in [0, E), the last num_shared of them the same for every token and the
    highest; w13: [E, 2 I, H], gate rows first; w2: [E, H, I]; weights and x of one dtype. Every product rounds to x's
    dtype. With `scales` weights are FP8, and what stands between the products isn't rounded, or to float16.
    Returns rows [n, H] in x's dtype and places [T, k] int32. Raises: ValueError on a wrong dtype or shape.
    """
    num_tokens, hidden = x.shape
    num_experts, inner = w2.shape[0], w2.shape[2]
    check("x", x, x.dtype, None, None)
    check("ids", ids, torch.int32, num_tokens, None)
    held = x.dtype if scales is None else FLOAT8
    check("w13", w13, held, num_experts, 2 * inner, hidden)
    check("w2", w2, held, None, hidden, None)
    if scales is not None:
        check("scales.w13", scales.w13, torch.float32, num_experts, 2 * inner)
        check("scales.w2", scales.w2, torch.float32, num_experts, hidden)
    check_same_device(x=x, ids=ids, w13=w13, w2=w2)
    for name, tensor in (("x", x), ("ids", ids), ("w13", w13), ("w2", w2)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    if not 0 <= num_shared <= min(ids.shape[1], num_experts):
        raise ValueError(f"num_shared: expected 0..{min(ids.shape[1], num_experts)}, got {num_shared}")
    if not x.is_cuda:
        return moe_experts_torch(x, ids, w13, w2, num_shared, scales)
    are_many = num_tokens >= _MANY_TOKENS or (num_tokens > FEW_TOKENS and is_hopper())
    if are_many and x.dtype == torch.bfloat16 and scales is None and can_use_tma(w13, w2):
        return moe_experts_sorted(x, ids, w13, w2, num_shared)
    return moe_experts_triton(x, ids, w13, w2, num_shared, scales)


def moe_experts_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return what `moe_experts` returns, in plain torch: one pair of products an active expert."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return ExpertRows(x, None)
    pair_expert = ids.numpy().reshape(-1)
    counts = np.bincount(pair_expert, minlength=w13.shape[0])
    # Each expert's rows start at a multiple of 16 and are filled up with copies of row 0, as the products want them.
    padded = -(-counts // ROW_MULTIPLE) * ROW_MULTIPLE
    starts = np.cumsum(padded) - padded
    order = np.argsort(pair_expert, kind="stable")
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[pair_expert[order]]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = starts[pair_expert[order]] + rank
    row_token = np.zeros(int(padded.sum()), dtype=np.int64)
    row_token[place] = np.arange(len(order)) // top_k

    rows = x.index_select(0, torch.from_numpy(row_token))
    segments = [(e, int(starts[e]), int(starts[e] + padded[e])) for e in np.flatnonzero(counts).tolist()]

    def weight_of(weights: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
        held = weights[expert]
        return held if scale is None else dequantize_rows(Float8Weight(held, scale[expert]), x.dtype)

    scale13, scale2 = scales or (None, None)
    gate_up = torch.cat([linear_torch(rows[a:b], weight_of(w13, scale13, e)) for e, a, b in segments])
    inner = silu_mul_torch(gate_up)
    down = torch.cat([linear_torch(inner[a:b], weight_of(w2, scale2, e)) for e, a, b in segments])
    return ExpertRows(down, torch.from_numpy(place.astype(np.int32)).view(num_tokens, top_k))


def moe_experts_sorted(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, num_shared: int = 0
) -> ExpertRows:
    """Return what `moe_experts` returns, over rows sorted by expert. Half precision, weights that TMA can load."""
    if not len(x):
        return ExpertRows(x, None)
    num_routed = w2.shape[0] - num_shared
    height = roomy_height(len(x) * (ids.shape[1] - num_shared), num_routed)
    pairs = sort_pairs(ids, w2.shape[0], num_shared, height)
    return ExpertRows(sorted_products(x, pairs, w13, w2), pairs.places.view(ids.shape))


def moe_experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    num_shared: int = 0,
    scales: ExpertScales | None = None,
) -> ExpertRows:
    """Return what `moe_experts` returns, over tiles of each expert's tokens."""
    return ExpertRows(grouped_products(x, ids, w13, w2, num_shared, scales), None)
