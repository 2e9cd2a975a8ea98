"""Commits a step's tokens to the slots' persistent state.

Knows: the per-slot tensors and how many tokens each request sampled and rejected. Doesn't decide anything: stop
conditions are the host's, so a slot may be ahead of its request until the host frees it.
"""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton


def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    total_len: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Each live slot has its sampled tokens appended and counted, and its computed tokens advanced; in place.

    For slot s of request b (`idx_mapping [B] int32`, -1 skipped) with n = `num_sampled[b]` tokens `sampled[b, :n]`:
    `token_ids[s, total_len[s] + i]` := token i (nothing past the last column), `output_counts[s, token]` += 1 each,
    `last_sampled[s]` := token n-1 if n > 0, `total_len[s]` += n, `num_computed_tokens[s]` += query length - rejected.
    `query_start_loc [B+1] int32`, `sampled [B, K+1] int64`, `num_sampled`, `num_rejected [B] int32`, `last_sampled
    [R] int64`, `total_len`, `num_computed_tokens [R] int32`, `token_ids [R, L] int32`, `output_counts [R, V] int32`.
    Raises: ValueError on a wrong dtype, shape or layout.
    """
    num_reqs, num_slots = idx_mapping.shape[0], last_sampled.shape[0]
    check("idx_mapping", idx_mapping, torch.int32, num_reqs)
    check("query_start_loc", query_start_loc, torch.int32, num_reqs + 1)
    check("sampled", sampled, torch.int64, num_reqs, None)
    check("num_sampled", num_sampled, torch.int32, num_reqs)
    check("num_rejected", num_rejected, torch.int32, num_reqs)
    check("last_sampled", last_sampled, torch.int64, num_slots)
    check("total_len", total_len, torch.int32, num_slots)
    check("token_ids", token_ids, torch.int32, num_slots, None)
    check("output_counts", output_counts, torch.int32, num_slots, None)
    check("num_computed_tokens", num_computed_tokens, torch.int32, num_slots)
    check_same_device(
        idx_mapping=idx_mapping, sampled=sampled, total_len=total_len, token_ids=token_ids, output_counts=output_counts
    )
    op = post_update_triton if idx_mapping.is_cuda else post_update_torch
    op(
        idx_mapping,
        query_start_loc,
        sampled,
        num_sampled,
        num_rejected,
        last_sampled=last_sampled,
        total_len=total_len,
        token_ids=token_ids,
        output_counts=output_counts,
        num_computed_tokens=num_computed_tokens,
    )


def post_update_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    total_len: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Do what `post_update` does, by torch operations."""
    reqs = (idx_mapping >= 0).nonzero().flatten()
    slots, counts, tokens = idx_mapping[reqs].long(), num_sampled[reqs], sampled[reqs]
    column = torch.arange(sampled.shape[1])
    at = total_len[slots, None] + column
    emitted = column < counts[:, None]
    slot_of = slots[:, None].expand_as(tokens)
    output_counts.index_put_((slot_of[emitted], tokens[emitted]), torch.ones((), dtype=torch.int32), accumulate=True)
    written = emitted & (at < token_ids.shape[1])
    token_ids[slot_of[written], at[written].long()] = tokens[written].int()
    some = counts > 0
    last_sampled[slots[some]] = tokens[some, counts[some].long() - 1]
    total_len[slots] += counts
    num_computed_tokens[slots] += query_start_loc.diff()[reqs] - num_rejected[reqs]


@triton.jit
def _post_update_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    total_len_ptr,
    token_ids_ptr,
    token_ids_stride,
    max_model_len,
    output_counts_ptr,
    output_counts_stride,
    num_computed_tokens_ptr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if slot < 0:
        return
    num_sampled = tl.load(num_sampled_ptr + req)
    total_len = tl.load(total_len_ptr + slot)
    num_computed = tl.load(num_computed_tokens_ptr + slot)
    query_len = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
    for i in range(num_sampled):
        token = tl.load(sampled_ptr + req * sampled_stride + i)
        at = total_len + i
        tl.store(token_ids_ptr + slot * token_ids_stride + at, token.to(tl.int32), mask=at < max_model_len)
        # Atomic because one request may emit a token twice: a plain load could pass the store before it.
        tl.atomic_add(output_counts_ptr + slot * output_counts_stride + token, 1)
    if num_sampled > 0:
        tl.store(last_sampled_ptr + slot, tl.load(sampled_ptr + req * sampled_stride + num_sampled - 1))
        tl.store(total_len_ptr + slot, total_len + num_sampled)
    tl.store(num_computed_tokens_ptr + slot, num_computed + query_len - tl.load(num_rejected_ptr + req))


def post_update_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    total_len: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Do what `post_update` does, by one program a request."""
    if idx_mapping.shape[0] == 0:
        return
    _post_update_kernel[(idx_mapping.shape[0],)](
        idx_mapping,
        query_start_loc,
        sampled,
        sampled.stride(0),
        num_sampled,
        num_rejected,
        last_sampled,
        total_len,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        output_counts,
        output_counts.stride(0),
        num_computed_tokens,
        num_warps=1,
    )
