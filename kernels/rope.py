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
    return rotate(q, cos[:, None], sin[:, None], interleaved), rotate(k, cos, sin, interleaved)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `out`, or a new tensor, with x [..., D], whose first elements are turned; further ones stay as they are.

    cos, sin: [..., P/2] float32, P <= D, of a shape that x broadcasts with. Layout and rounding as in `apply_rope`.
    """
    half = cos.shape[-1]
    if not interleaved and 2 * half == x.shape[-1] and out is None:
        # the same products and sums on whole heads: x * [cos, cos] + [second, first] * [-sin, sin]
        wide = x.float()
        swapped = torch.cat([wide[..., half:], wide[..., :half]], -1)
        return (wide * torch.cat([cos, cos], -1)).add_(swapped.mul_(torch.cat([-sin, sin], -1))).to(x.dtype)
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = x[..., pairs[0]].float(), x[..., pairs[1]].float()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
