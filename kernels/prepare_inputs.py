"""Builds a step's token-level inputs from the slots' state: ids, positions, sequence lengths and KV slots.

Knows: the committed tokens, the drafts, the block tables. The host only says which slots run and how many tokens each.
"""

from typing import NamedTuple

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 512


class StepInputs(NamedTuple):
    """What the target's forward reads; T tokens, B requests, both including padding."""

    input_ids: torch.Tensor  # [T] int64, -1 = placeholder draft, 0 = padding
    positions: torch.Tensor  # [T] int64, 0 = padding
    seq_lens: torch.Tensor  # [B] int32, computed + query length, 0 = padded row
    slot_mapping: torch.Tensor  # [T] int64, -1 = do not write


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> StepInputs:
    """Return the inputs of a step of `num_tokens` rows, of which the last may be padding.

    Token i of request b has position p = computed + i; its id is the committed token at p, past those the draft, past
    the drafts -1. Its KV slot is `block_tables[slot, p // block_size] * block_size + p % block_size`, -1 past the
    table and in block 0, which belongs to nobody. `idx_mapping [B] int32` (-1 = padded row), `query_start_loc [B+1]
    int32` (its last entry <= num_tokens), `token_ids [R, L] int32`, `total_len`, `num_computed_tokens [R] int32`,
    `draft_tokens [R, K] int64` (K may be 0), `block_tables [R, MB] int32`.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_slots = total_len.shape[0]
    check("idx_mapping", idx_mapping, torch.int32, None)
    check("query_start_loc", query_start_loc, torch.int32, idx_mapping.shape[0] + 1)
    check("token_ids", token_ids, torch.int32, num_slots, None)
    check("total_len", total_len, torch.int32, num_slots)
    check("num_computed_tokens", num_computed_tokens, torch.int32, num_slots)
    check("draft_tokens", draft_tokens, torch.int64, num_slots, None)
    check("block_tables", block_tables, torch.int32, num_slots, None)
    check_same_device(
        idx_mapping=idx_mapping, token_ids=token_ids, draft_tokens=draft_tokens, block_tables=block_tables
    )
    op = prepare_inputs_triton if idx_mapping.is_cuda else prepare_inputs_torch
    return op(
        idx_mapping,
        query_start_loc,
        num_tokens,
        token_ids=token_ids,
        total_len=total_len,
        num_computed_tokens=num_computed_tokens,
        draft_tokens=draft_tokens,
        block_tables=block_tables,
        block_size=block_size,
    )


def prepare_inputs_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> StepInputs:
    """Return what `prepare_inputs` returns, by torch operations."""
    live = idx_mapping >= 0
    query_lens = query_start_loc.diff()
    computed = num_computed_tokens[idx_mapping.long().clamp(min=0)]
    inputs = StepInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        seq_lens=(computed + query_lens) * live,
        slot_mapping=torch.full((num_tokens,), -1),
    )
    num_rows, num_drafts, max_blocks = int(query_start_loc[-1]), draft_tokens.shape[1], block_tables.shape[1]
    req = torch.repeat_interleave(query_lens)
    slot = idx_mapping.long()[req]
    position = computed[req] + torch.arange(num_rows) - query_start_loc[req]
    draft_idx = position - total_len[slot.clamp(min=0)]
    ids = token_ids[slot.clamp(min=0), position.clamp(max=token_ids.shape[1] - 1)].long()
    drafted = draft_idx >= 0
    if bool(drafted.any()):
        ids[drafted] = -1
        drafted &= draft_idx < num_drafts
        ids[drafted] = draft_tokens[slot[drafted], draft_idx[drafted]]
    block = position // block_size
    number = block_tables[slot.clamp(min=0), block.clamp(max=max_blocks - 1)].long()
    used = slot >= 0
    inputs.input_ids[:num_rows] = ids * used
    inputs.positions[:num_rows] = position * used
    inputs.slot_mapping[:num_rows] = torch.where(
        used & (block < max_blocks) & (number > 0), number * block_size + position % block_size, -1
    )
    return inputs


@triton.jit
def _prepare_inputs_kernel(
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_reqs,
    num_tokens,
    token_ids_ptr,
    token_ids_stride,
    total_len_ptr,
    num_computed_tokens_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    num_drafts,
    block_tables_ptr,
    block_tables_stride,
    max_blocks,
    block_size,
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
    live = slot >= 0
    computed = tl.load(num_computed_tokens_ptr + slot, mask=live, other=0)
    total_len = tl.load(total_len_ptr + slot, mask=live, other=0)
    tl.store(seq_lens_ptr + req, tl.where(live, computed + end - start, 0), mask=is_req)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < end
        position = (computed + row - start).to(tl.int64)
        draft_idx = position - total_len
        use = row < tl.where(live, end, start)
        committed = use & (draft_idx < 0) & (position < max_model_len)
        token = tl.load(token_ids_ptr + slot * token_ids_stride + position, mask=committed, other=0).to(tl.int64)
        drafted = use & (draft_idx >= 0)
        draft = tl.load(
            draft_tokens_ptr + slot * draft_tokens_stride + draft_idx, mask=drafted & (draft_idx < num_drafts), other=-1
        )
        block = position // block_size
        in_table = use & (block < max_blocks)
        number = tl.load(block_tables_ptr + slot * block_tables_stride + block, mask=in_table, other=0).to(tl.int64)
        tl.store(input_ids_ptr + row, tl.where(drafted, draft, token), mask=mask)
        tl.store(positions_ptr + row, tl.where(live, position, 0), mask=mask)
        kv_slot = number * block_size + position % block_size
        tl.store(slot_mapping_ptr + row, tl.where(in_table & (number > 0), kv_slot, -1), mask=mask)


def prepare_inputs_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> StepInputs:
    """Return what `prepare_inputs` returns, by one program a request and one for the padding."""
    num_reqs, device = idx_mapping.shape[0], idx_mapping.device
    inputs = StepInputs(
        input_ids=torch.empty(num_tokens, dtype=torch.int64, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        seq_lens=torch.empty(num_reqs, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
    )
    _prepare_inputs_kernel[(num_reqs + 1,)](
        *inputs,
        idx_mapping,
        query_start_loc,
        num_reqs,
        num_tokens,
        token_ids,
        token_ids.stride(0),
        total_len,
        num_computed_tokens,
        draft_tokens,
        draft_tokens.stride(0),
        draft_tokens.shape[1],
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1],
        block_size,
        token_ids.shape[1],
        BLOCK=_BLOCK,
    )
    return inputs
