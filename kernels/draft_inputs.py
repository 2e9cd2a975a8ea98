"""Builds the drafter's inputs: for its first pass over the target's tokens, and for each single-token step after it.

Knows: the step's tokens, what was accepted, the drafts so far and the block tables. The first pass keeps the target's
token count and layout: rejected rows become padding, so the host need not know how many there are.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 512


class DraftPrefill(NamedTuple):
    """Inputs of the drafter's pass over the target's T tokens (positions and sequence lengths stay the target's)."""

    input_ids: torch.Tensor  # [T] int64, the next token of each row; 0 where rejected or padding
    slot_mapping: torch.Tensor  # [T] int64, -1 = do not write
    last_indices: torch.Tensor  # [B] int64, the row whose output proposes the first draft; 0 for padded rows
    base_positions: torch.Tensor  # [B] int64, the position of that row


class DraftDecode(NamedTuple):
    """Inputs of one later drafting step, `width` tokens a request."""

    input_ids: torch.Tensor  # [B * width] int64
    positions: torch.Tensor  # [B * width] int64
    slot_mapping: torch.Tensor  # [B * width] int64, -1 = do not write
    seq_lens: torch.Tensor  # [B] int32, 0 = padded row


def prepare_draft_prefill(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    token_ids: torch.Tensor,
) -> DraftPrefill:
    """Return the drafter's first-pass inputs: each request's kept ids shifted left by one, closed by the token that
    follows.

    Request b keeps q = query length - `num_rejected[b]` rows. Row i < q - 1 gets the id of row i + 1; row q - 1 gets
    `last_sampled[slot]` if `num_sampled[b]` > 0, else (unfinished prefill) `token_ids[slot, position + 1]`, 0 past
    the last column. Rows from q on and padding get id 0 and slot -1. `idx_mapping [B] int32` (-1 = padded),
    `query_start_loc [B+1] int32`, `input_ids`, `positions`, `slot_mapping [T] int64`, `num_sampled`, `num_rejected
    [B] int32`, `last_sampled [R] int64`, `token_ids [R, L] int32`.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
    check("idx_mapping", idx_mapping, torch.int32, num_reqs)
    check("query_start_loc", query_start_loc, torch.int32, num_reqs + 1)
    check("input_ids", input_ids, torch.int64, num_tokens)
    check("positions", positions, torch.int64, num_tokens)
    check("slot_mapping", slot_mapping, torch.int64, num_tokens)
    check("num_sampled", num_sampled, torch.int32, num_reqs)
    check("num_rejected", num_rejected, torch.int32, num_reqs)
    check("last_sampled", last_sampled, torch.int64, None)
    check("token_ids", token_ids, torch.int32, last_sampled.shape[0], None)
    check_same_device(idx_mapping=idx_mapping, input_ids=input_ids, last_sampled=last_sampled, token_ids=token_ids)
    op = prepare_draft_prefill_triton if input_ids.is_cuda else prepare_draft_prefill_torch
    return op(
        idx_mapping,
        query_start_loc,
        input_ids,
        positions,
        slot_mapping,
        num_sampled,
        num_rejected,
        last_sampled=last_sampled,
        token_ids=token_ids,
    )


def prepare_draft_prefill_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    token_ids: torch.Tensor,
) -> DraftPrefill:
    """Return what `prepare_draft_prefill` returns, by torch operations."""
    query_lens = query_start_loc.diff()
    slots = idx_mapping.long().clamp(min=0)
    live = (idx_mapping >= 0) & (query_lens > 0)
    kept = (query_lens - num_rejected) * live
    num_rows = int(query_start_loc[-1])

    req = torch.repeat_interleave(query_lens)
    keep = torch.zeros(input_ids.shape, dtype=torch.bool)
    keep[:num_rows] = torch.arange(num_rows) - query_start_loc[req] < kept[req]
    shifted = torch.zeros_like(input_ids)
    shifted[:-1] = input_ids[1:]
    last_indices = torch.where(live, query_start_loc[:-1] + kept - 1, 0).long()
    base_positions = positions[last_indices] if input_ids.shape[0] else last_indices
    following, max_model_len = base_positions + 1, token_ids.shape[1]
    known = token_ids[slots, following.clamp(max=max_model_len - 1)] * (following < max_model_len)
    shifted[last_indices[live]] = torch.where(num_sampled > 0, last_sampled[slots], known.long())[live]
    return DraftPrefill(shifted * keep, torch.where(keep, slot_mapping, -1), last_indices, base_positions)


@triton.jit
def _draft_prefill_kernel(
    out_ids_ptr,
    out_slots_ptr,
    last_indices_ptr,
    base_positions_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_reqs,
    num_tokens,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    token_ids_ptr,
    token_ids_stride,
    max_model_len,
    BLOCK: tl.constexpr,
):
    # Program num_reqs clears the padding behind the last request.
    req = tl.program_id(0).to(tl.int64)
    is_req = req < num_reqs
    start = tl.load(query_start_loc_ptr + req)
    end = tl.load(query_start_loc_ptr + req + 1, mask=is_req, other=0)
    end = tl.where(is_req, end, num_tokens)
    slot = tl.load(idx_mapping_ptr + req, mask=is_req, other=-1).to(tl.int64)
    live = (slot >= 0) & (end > start)
    num_rejected = tl.load(num_rejected_ptr + req, mask=live, other=0)
    last = tl.where(live, end - num_rejected - 1, 0)
    base_position = tl.load(positions_ptr + last, mask=is_req & (num_tokens > 0), other=0)
    tl.store(last_indices_ptr + req, last.to(tl.int64), mask=is_req)
    tl.store(base_positions_ptr + req, base_position, mask=is_req)

    has_sampled = tl.load(num_sampled_ptr + req, mask=live, other=0) > 0
    sampled = tl.load(last_sampled_ptr + slot, mask=live & has_sampled, other=0)
    in_prompt = live & (has_sampled == 0) & (base_position + 1 < max_model_len)
    known = tl.load(token_ids_ptr + slot * token_ids_stride + base_position + 1, mask=in_prompt, other=0)
    following = tl.where(has_sampled, sampled, known.to(tl.int64))
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < end
        keep = mask & (row < tl.where(live, last + 1, start))
        token = tl.load(input_ids_ptr + row + 1, mask=keep & (row < last), other=0)
        tl.store(out_ids_ptr + row, tl.where(keep & (row == last), following, token), mask=mask)
        kv_slot = tl.load(slot_mapping_ptr + row, mask=keep, other=-1)
        tl.store(out_slots_ptr + row, kv_slot, mask=mask)


def prepare_draft_prefill_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    token_ids: torch.Tensor,
) -> DraftPrefill:
    """Return what `prepare_draft_prefill` returns, by one program a request and one for the padding."""
    num_reqs = idx_mapping.shape[0]
    out = DraftPrefill(
        torch.empty_like(input_ids),
        torch.empty_like(slot_mapping),
        torch.empty(num_reqs, dtype=torch.int64, device=input_ids.device),
        torch.empty(num_reqs, dtype=torch.int64, device=input_ids.device),
    )
    _draft_prefill_kernel[(num_reqs + 1,)](
        *out,
        idx_mapping,
        query_start_loc,
        num_reqs,
        input_ids.shape[0],
        input_ids,
        positions,
        slot_mapping,
        num_sampled,
        num_rejected,
        last_sampled,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        BLOCK=_BLOCK,
    )
    return out


def prepare_draft_decode(
    step: int,
    width: int,
    idx_mapping: torch.Tensor,
    base_positions: torch.Tensor,
    drafts: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_model_len: int,
) -> DraftDecode:
    """Return the inputs of drafting step `step` >= 1, which reads drafts `step - width` to `step - 1` (0-based).

    Token j of request b is draft i - 1 with i = step - width + 1 + j, at position base + i; the sequence is base +
    step + 1 long. Positions at or past `max_model_len` are clamped to its last with slot -1, the length to
    `max_model_len`; block 0 belongs to nobody, its slot is -1. Padded rows: id 0, position 0, slot -1, length 0.
    `idx_mapping [B] int32`, `base_positions [B] int64`, `drafts [B, K] int64`, `block_tables [R, MB] int32`.
    Raises: ValueError on a wrong dtype, shape or layout, or unless 1 <= width <= step <= K.
    """
    num_reqs = idx_mapping.shape[0]
    check("idx_mapping", idx_mapping, torch.int32, num_reqs)
    check("base_positions", base_positions, torch.int64, num_reqs)
    check("drafts", drafts, torch.int64, num_reqs, None)
    check("block_tables", block_tables, torch.int32, None, None)
    check_same_device(idx_mapping=idx_mapping, base_positions=base_positions, drafts=drafts, block_tables=block_tables)
    if not 1 <= width <= step <= drafts.shape[1]:
        raise ValueError(f"expected 1 <= width <= step <= {drafts.shape[1]}, got width {width}, step {step}")
    op = prepare_draft_decode_triton if drafts.is_cuda else prepare_draft_decode_torch
    return op(step, width, idx_mapping, base_positions, drafts, block_tables, block_size, max_model_len)


def prepare_draft_decode_torch(
    step: int,
    width: int,
    idx_mapping: torch.Tensor,
    base_positions: torch.Tensor,
    drafts: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_model_len: int,
) -> DraftDecode:
    """Return what `prepare_draft_decode` returns, by torch operations."""
    live = (idx_mapping >= 0)[:, None]
    ids = drafts[:, step - width : step] * live
    ahead = base_positions[:, None] + torch.arange(step - width + 1, step + 1)
    positions = ahead.clamp(max=max_model_len - 1) * live
    block, max_blocks = positions // block_size, block_tables.shape[1]
    number = block_tables[idx_mapping.long().clamp(min=0)[:, None], block.clamp(max=max_blocks - 1)].long()
    writable = live & (ahead < max_model_len) & (block < max_blocks)
    slot_mapping = torch.where(writable & (number > 0), number * block_size + positions % block_size, -1)
    seq_lens = ((base_positions + step + 1).clamp(max=max_model_len) * live[:, 0]).int()
    return DraftDecode(ids.flatten(), positions.flatten(), slot_mapping.flatten(), seq_lens)


@triton.jit
def _draft_decode_kernel(
    out_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    base_positions_ptr,
    drafts_ptr,
    drafts_stride,
    block_tables_ptr,
    block_tables_stride,
    max_blocks,
    step,
    block_size,
    max_model_len,
    WIDTH: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    live = slot >= 0
    base = tl.load(base_positions_ptr + req)
    seq_len = tl.minimum(base + step + 1, max_model_len)
    tl.store(seq_lens_ptr + req, tl.where(live, seq_len, 0).to(tl.int32))
    for j in range(WIDTH):
        i = step - WIDTH + 1 + j
        ahead = base + i
        position = tl.minimum(ahead, max_model_len - 1)
        block = position // block_size
        writable = live & (ahead < max_model_len) & (block < max_blocks)
        token = tl.load(drafts_ptr + req * drafts_stride + i - 1, mask=live, other=0)
        number = tl.load(block_tables_ptr + slot * block_tables_stride + block, mask=writable, other=0).to(tl.int64)
        kv_slot = number * block_size + position % block_size
        tl.store(out_ids_ptr + req * WIDTH + j, token)
        tl.store(positions_ptr + req * WIDTH + j, tl.where(live, position, 0))
        tl.store(slot_mapping_ptr + req * WIDTH + j, tl.where(writable & (number > 0), kv_slot, -1))


def prepare_draft_decode_triton(
    step: int,
    width: int,
    idx_mapping: torch.Tensor,
    base_positions: torch.Tensor,
    drafts: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_model_len: int,
) -> DraftDecode:
    """Return what `prepare_draft_decode` returns, by one program a request."""
    num_reqs, device = idx_mapping.shape[0], drafts.device
    input_ids = torch.empty(num_reqs * width, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
    out = DraftDecode(input_ids, torch.empty_like(input_ids), torch.empty_like(input_ids), seq_lens)
    if num_reqs:
        _draft_decode_kernel[(num_reqs,)](
            *out,
            idx_mapping,
            base_positions,
            drafts,
            drafts.stride(0),
            block_tables,
            block_tables.stride(0),
            block_tables.shape[1],
            step,
            block_size,
            max_model_len,
            WIDTH=width,
            num_warps=1,
        )
    return out
