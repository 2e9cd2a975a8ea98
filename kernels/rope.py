"""Rotary embedding of queries and of one key head, in plain torch: the twins of the fused kernels share it.

The table of cosines and sines comes from `models.rope_table`. Computed in float32 and rounded once; element by element,
so a row's bits are its own.
"""

import torch


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated by their positions, as new contiguous tensors; the inputs stay as they are.

    q: [T, H, P], k: [T, P], rows and heads may be strided; positions: [T] int64, clamped into the table;
    cos_sin: [max_pos, P] float32, cosines in [:P/2], sines in [P/2:]. interleaved: pairs (2i, 2i+1), else (i, i + P/2);
    the output keeps the input's layout.
    Source: Su et al., arXiv 2104.09864, eq. 34.
    """
    table = cos_sin.index_select(0, positions.clamp(0, cos_sin.shape[0] - 1))
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos[:, None], sin[:, None], interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = x.shape[-1] // 2
    pairs = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    first, second = x[..., pairs[0]].float(), x[..., pairs[1]].float()
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = second * cos + first * sin
    return out
