"""Paged, causal multi-head latent attention in absorbed form: queries against the cached latents themselves.

A row (one query token, all heads) has one arithmetic whether it comes as decode, verification or prefill chunk: tiles
of a fixed number of query rows, keys in a fixed order of chunks counted from position 0, softmax in float32 (on CUDA
running along with the keys). A chunk that a row can't see changes nothing in it (factor 1, sum + 0), so neighbours,
chunking, padding and block placement don't reach its bits. Unwritten slots may hold NaN: keys outside a row's range
are masked, and their values cleared, before they are multiplied. On CUDA a long context is cut into splits of a fixed
number of keys, whose partial results are joined in their order; one split gives the same bits as a join of one, so the
bound `max_seq_len` doesn't matter either. Measured on the CPU (AVX-512, 1 and 2 threads): bmm's item bits depend
neither on the number of items nor on the row's place.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._kv_cache import check_kv_cache
from specgen.kernels._mla_common import mla_join_kernel
from specgen.kernels._mla_hopper import mla_hopper_kernel
from specgen.kernels._mla_plan import KEYS, Slab, plan_slabs
from specgen.kernels._mla_whole import mla_split_kernel
from specgen.kernels._mla_wide import mla_scores_kernel, mla_values_kernel
from specgen.kernels._mla_wide_hopper import mla_scores_hopper_kernel, mla_values_hopper_kernel
from specgen.kernels._tile_attention import attend, pad_heads, tile_queries
from specgen.kernels._tiles import looked_at
from specgen.kernels._triton import can_use_tma, hopper_descriptor, is_hopper, launched, pdl, triton

# On CUDA: rows of a tile (queries x heads), keys a step, keys of a split. Never a function of the batch.
_TILE_ROWS = 64
_STEP_KEYS = 64
_SPLIT_KEYS = 1024
# Up to so many tiles, of so many steps in all, keys and values are spread over the machine: faster, with the same bits.
_WIDE_TILES, _WIDE_STEPS = 64, 1024
_WIDE_HOPPER_STEPS = 384  # the forms for Hopper meet at about 400 steps, whether of one tile or of many
_FEW_TILES = 8
# Columns of the values a program takes, inner columns of a score's step and stages: for few tiles, and for more.
_WIDE_FEW = (32, 128, 4)
_WIDE_MORE = (128, 64, 4)
_SLICE = 128  # columns that the forms for Hopper fetch at once
_HOPPER_STAGES = (4, 8)  # of the wide form's values: slices of _SLICE columns, of 64
_VALUES_STAGES = 5  # block numbers are loaded, then values: two of each are on their way
_SCRATCH_BYTES = 256 << 20  # partial results held at once; a longer step runs in several launches
_LOG2_E = 1.4426950408889634


def mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return every query's softmax-weighted sum of the latents it may see.

    q: [T, H, R + P], contiguous; kv_cache: [num_blocks, block_size, R + P], same dtype or FP8, the first R columns
    are the values; block_tables: [slots, MB] int32; idx_mapping: [B] int32 (request -> slot, -1 padded);
    query_start_loc: [B + 1] int32; seq_lens: [B] int32. Query token i of request b sits at position seq_lens[b] -
    query_len + i and sees the keys key_start..position. scale > 0 multiplies the scores; max_query_len and max_seq_len
    bound the step from the host.
    Returns [T, H, R] in q's dtype; zeros for rows without a visible key and for padded requests. Rows past the last
    request hold anything.
    Raises: ValueError on a wrong dtype or shape.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """
    num_requests = idx_mapping.shape[0]
    check("q", q, q.dtype, None, None, None)
    check_kv_cache(kv_cache, q.dtype, q.shape[2])
    check("block_tables", block_tables, torch.int32, None, None)
    check("idx_mapping", idx_mapping, torch.int32, num_requests)
    check("query_start_loc", query_start_loc, torch.int32, num_requests + 1)
    check("seq_lens", seq_lens, torch.int32, num_requests)
    check_same_device(
        q=q,
        kv_cache=kv_cache,
        block_tables=block_tables,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    if not q.is_contiguous():
        raise ValueError("q: expected a contiguous tensor")
    if not 0 < kv_lora_rank <= q.shape[2]:
        raise ValueError(f"kv_lora_rank: expected 1..{q.shape[2]}, got {kv_lora_rank}")
    return (mla_attention_triton if q.is_cuda else mla_attention_torch)(
        q,
        kv_cache,
        block_tables,
        idx_mapping,
        query_start_loc,
        seq_lens,
        kv_lora_rank,
        scale,
        max_query_len,
        max_seq_len,
        key_start,
    )


def mla_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `mla_attention` returns, in plain torch: many tiles and their chunks at once."""
    num_heads, width = q.shape[1:]
    block_size = kv_cache.shape[1]
    queries = tile_queries(num_heads, width, kv_lora_rank, max_query_len)
    out = q.new_zeros(q.shape[0], num_heads, kv_lora_rank)
    slots = idx_mapping.numpy()
    if not len(slots):
        return out
    num_blocks = -(-max(int(seq_lens.max()), 1) // block_size)
    tables = block_tables.numpy()[np.maximum(slots, 0), :num_blocks]
    slabs = plan_slabs(
        (slots >= 0).tobytes(),
        query_start_loc.numpy().tobytes(),
        seq_lens.numpy().tobytes(),
        tables.tobytes(),
        block_size,
        queries,
        key_start,
    )
    for slab in slabs:
        rows = _attend(q, kv_cache.view(-1, width), slab, kv_lora_rank, scale)
        if slab.used is not None:
            rows = rows.index_select(0, slab.used)
        out.index_copy_(0, slab.out_rows, rows.to(q.dtype))
    return out


def _attend(q: torch.Tensor, cache: torch.Tensor, slab: Slab, kv_lora_rank: int, scale: float) -> torch.Tensor:
    """Return the results of a slab's tiles [n * Q, H, R] float32. cache: [slots, R + P]."""
    num_heads, width = q.shape[1:]
    queries = len(slab.token_rows) // slab.num_tiles
    rows = pad_heads(q.index_select(0, slab.token_rows).float().mul_(scale), queries)
    keys = cache.index_select(0, slab.slots).float()
    if slab.mixed is not None:
        # Such a key may be unwritten (a rejected draft's), and 0 * NaN would reach the queries before it.
        keys.index_copy_(0, slab.mixed, keys.index_select(0, slab.mixed).nan_to_num_(0.0, 0.0, 0.0))
    keys = keys.view(-1, 1, KEYS, width)
    out = attend(rows.view(slab.num_tiles, 1, -1, width), keys, keys[..., :kv_lora_rank], slab)
    return out.view(*rows.shape[:2], kv_lora_rank)[:, :num_heads]


def mla_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    key_start: int = 0,
) -> torch.Tensor:
    """Return what `mla_attention` returns: the wide form for few tiles, else the whole one; then the splits' join."""
    num_tokens, num_heads, width = q.shape
    num_requests = idx_mapping.shape[0]
    out = q.new_empty(num_tokens, num_heads, kv_lora_rank)
    if num_tokens == 0 or num_requests == 0:
        return out
    heads = min(triton.next_power_of_2(num_heads), _TILE_ROWS)
    queries = _TILE_ROWS // heads
    rank = max(16, triton.next_power_of_2(kv_lora_rank))
    head_groups = triton.cdiv(num_heads, heads)
    splits = max(1, triton.cdiv(max_seq_len, _SPLIT_KEYS))
    steps = max(1, triton.cdiv(max_seq_len, _STEP_KEYS))
    # Request b's tiles start at number query_start_loc[b] // queries + b: room enough for each, found without the host.
    num_tiles = num_tokens // queries + num_requests
    blocks = _hopper_blocks(q, kv_cache, kv_lora_rank)
    is_wide = _is_wide(num_tiles * head_groups, steps, blocks is not None)
    partial_bytes = head_groups * splits * _TILE_ROWS * (rank + 2) * 4 if splits > 1 else 0
    scores_bytes = head_groups * steps * _TILE_ROWS * _STEP_KEYS * 4 if is_wide else 0
    tiles_a_launch = max(1, min(num_tiles, _SCRATCH_BYTES // max(1, partial_bytes + scores_bytes)))
    launch = _Launch(
        q,
        kv_cache,
        (block_tables, block_tables.stride(0), idx_mapping, query_start_loc, seq_lens),
        out,
        torch.empty(partial_bytes // 4 * tiles_a_launch, dtype=torch.float32, device=q.device),
        torch.empty(scores_bytes // 4 * tiles_a_launch, dtype=torch.float32, device=q.device),
        (num_requests, num_heads, kv_lora_rank),
        scale * _LOG2_E,
        (head_groups, steps, splits),
        rank,
        max(16, triton.next_power_of_2(width - kv_lora_rank)),
        {"STEP_KEYS": _STEP_KEYS, "KEY_START": key_start},
        {"HEADS": heads, "QUERIES": queries, "REQUESTS": looked_at(num_requests), **pdl()},
    )
    run, run_hopper, form = (
        (_run_wide, _run_wide_hopper, "latent attention of few rows")
        if is_wide
        else (_run_whole, _run_whole_hopper, "latent attention")
    )
    for first_tile in range(0, num_tiles, tiles_a_launch):
        tiles = min(tiles_a_launch, num_tiles - first_tile)
        if blocks is None or not launched(form, partial(run_hopper, launch, first_tile, tiles, *blocks)):
            run(launch, first_tile, tiles)
        if splits > 1:
            mla_join_kernel[(tiles, head_groups, _TILE_ROWS)](
                *launch.step[2:], launch.partial_results, out, first_tile, *launch.sizes, splits, launch.scale_log2,
                RANK=rank, SPLIT_KEYS=_SPLIT_KEYS, num_warps=4, **launch.shared,
            )  # fmt: skip
    return out


class _Launch(NamedTuple):
    """What the forms take: tensors, numbers, and constants."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    step: tuple[Any, ...]  # block tables and their stride, slots, starts, lengths
    out: torch.Tensor
    partial_results: torch.Tensor
    scores: torch.Tensor
    sizes: tuple[int, int, int]  # requests, heads, rank
    scale_log2: float
    counts: tuple[int, int, int]  # groups of heads, steps and splits of the longest row
    rank: int  # both as powers of two
    rope: int
    paged: dict[str, int]
    shared: dict[str, Any]

    @property
    def cut(self) -> dict[str, Any]:
        """Constants of the kernels that sum over a split."""
        by_split = self.counts[2] > 1
        return {"RANK": self.rank, "SPLIT_KEYS": _SPLIT_KEYS, "BY_SPLIT": by_split, **self.paged, **self.shared}


def _run_wide(launch: _Launch, first_tile: int, tiles: int) -> None:
    m = launch
    head_groups, steps, splits = m.counts
    column_slice, chunk, stages = _WIDE_FEW if tiles * head_groups <= _FEW_TILES else _WIDE_MORE
    column_slice = min(column_slice, m.rank)
    rope_width, block_size = m.q.shape[2] - m.sizes[2], m.kv_cache.shape[1]
    mla_scores_kernel[(tiles, head_groups, steps)](
        m.q, m.kv_cache, *m.step, m.scores, first_tile, *m.sizes, rope_width, RANK=m.rank, ROPE=m.rope,
        CHUNK=min(chunk, m.rank), BLOCK_SIZE=block_size, num_warps=4, num_stages=stages, **m.paged, **m.shared,
    )  # fmt: skip
    mla_values_kernel[(tiles, head_groups, splits * (m.rank // column_slice))](
        m.scores, m.kv_cache, *m.step, m.out, m.partial_results, first_tile, m.sizes[0], steps, *m.sizes[1:],
        rope_width, m.scale_log2, SLICE=column_slice, BLOCK_SIZE=block_size, num_warps=4, num_stages=_VALUES_STAGES,
        **m.cut,
    )  # fmt: skip


def _run_wide_hopper(launch: _Launch, first_tile: int, tiles: int, latents: Any, ropes: Any) -> None:
    m = launch
    head_groups, steps, splits = m.counts
    is_few = tiles * head_groups <= _FEW_TILES
    slices = m.rank // (m.rope if is_few else _SLICE)  # of the values' columns, as wide as a descriptor's block
    # The second reads the cache before the first has ended, which had waited for what writes it.
    mla_scores_hopper_kernel[(tiles, head_groups, steps)](
        m.q, latents, ropes, *m.step, m.scores, first_tile, *m.sizes[:2], RANK=m.rank, ROPE=m.rope, num_warps=4,
        **m.paged, **m.shared,
    )  # fmt: skip
    mla_values_hopper_kernel[(tiles, head_groups, splits * slices)](
        m.scores, ropes if is_few else latents, *m.step, m.out, m.partial_results, first_tile, m.sizes[0], steps,
        m.sizes[1], m.scale_log2, STAGES=_HOPPER_STAGES[is_few], num_warps=4, **m.cut,
    )  # fmt: skip


def _run_whole(launch: _Launch, first_tile: int, tiles: int) -> None:
    m = launch
    head_groups, _, splits = m.counts
    mla_split_kernel[(tiles, head_groups, splits)](
        m.q, m.kv_cache, *m.step, m.out, m.partial_results, first_tile, *m.sizes, m.q.shape[2] - m.sizes[2],
        m.scale_log2, ROPE=m.rope, BLOCK_SIZE=m.kv_cache.shape[1], num_warps=8, num_stages=2, **m.cut,
    )  # fmt: skip


def _run_whole_hopper(launch: _Launch, first_tile: int, tiles: int, latents: Any, ropes: Any) -> None:
    m = launch
    head_groups, _, splits = m.counts
    mla_hopper_kernel[(tiles, head_groups, splits)](
        m.q, latents, ropes, *m.step, m.out, m.partial_results, first_tile, *m.sizes[:2], m.scale_log2, ROPE=m.rope,
        num_warps=4, **m.cut,
    )  # fmt: skip


def _is_wide(num_tiles: int, num_steps: int, on_hopper: bool) -> bool:
    return num_tiles <= _WIDE_TILES and num_tiles * num_steps <= (_WIDE_HOPPER_STEPS if on_hopper else _WIDE_STEPS)


def _hopper_blocks(q: torch.Tensor, kv_cache: torch.Tensor, rank: int) -> list[Any] | None:
    """Return what the forms for Hopper fetch latents and rotated keys by; None where they do not apply."""
    block_size, width = kv_cache.shape[1:]
    fits = rank == 512 and width == 576 and block_size == _STEP_KEYS and kv_cache.dtype == q.dtype and q.itemsize == 2
    if not (fits and q.is_cuda and can_use_tma(kv_cache) and is_hopper()):
        return None
    rows = kv_cache.view(-1, width)
    return [hopper_descriptor(rows, [block_size, columns]) for columns in (_SLICE, width - rank)]
