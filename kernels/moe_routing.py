"""The choice of experts: sigmoid scores with a bias, or softmax scores; groups first. It knows logits only."""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import pdl, start_next_and_wait, tl, triton


def route(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    num_shared: int = 0,
    softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's expert weights and ids, best choice first, ties to the lowest id.

    router_logits: [T, E] float32; bias: [E] float32 or None, added for the choice only. The topk_group groups with the
    largest sum of their two best choices stay, then the top_k best choices within them; weights are the scores there,
    divided by their sum if norm_topk_prob, times scaling_factor. softmax: scores are the logits' softmax, not their
    sigmoid, and a group counts by its one best choice. A NaN is never preferred. Behind them come num_shared
    experts that every token takes, ids E, E + 1, ..., with weight 1. Returns ([T, top_k + num_shared] float32, the same
    int32).
    Raises: ValueError on a wrong dtype or shape, or impossible counts.
    Source: DeepSeek-V3, arXiv 2412.19437, eq. 12-16, with the node-limited routing of section 2.1.2.
    """
    check("router_logits", router_logits, torch.float32, None, None)
    num_experts = router_logits.shape[1]
    if bias is not None:
        check("bias", bias, torch.float32, num_experts)
        check_same_device(router_logits=router_logits, bias=bias)
    if n_group < 1 or num_experts % n_group:
        raise ValueError(f"n_group: {num_experts} experts can't be divided into {n_group} equal groups")
    if not 1 <= topk_group <= n_group or not 1 <= top_k <= topk_group * (num_experts // n_group):
        raise ValueError(f"top_k {top_k} experts from {topk_group} of {n_group} groups of {num_experts // n_group}")
    run = route_triton if router_logits.is_cuda else route_torch
    return run(router_logits, bias, top_k, n_group, topk_group, norm_topk_prob, scaling_factor, num_shared, softmax)


def route_torch(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    num_shared: int = 0,
    softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `route` returns, in plain torch. Stable sorts, as topk's order among ties is undefined."""
    num_tokens, num_experts = router_logits.shape
    # Not torch.sigmoid: its bits depend on where in the tensor an element lies.
    if softmax:
        shifted = torch.exp(router_logits - router_logits.amax(-1, keepdim=True))
        scores = shifted / shifted.sum(-1, keepdim=True)
    else:
        scores = torch.exp(-router_logits).add_(1.0).reciprocal_()
    choice = (scores if bias is None else scores + bias).nan_to_num(float("-inf"), float("inf"), float("-inf"))
    if topk_group < n_group:
        grouped = choice.view(num_tokens, n_group, -1)
        best = grouped.topk(1 if softmax else min(2, grouped.shape[2]), dim=-1).values
        group_score = best[..., 0] + best[..., 1] if best.shape[2] == 2 else best[..., 0]
        dropped = group_score.sort(dim=-1, descending=True, stable=True).indices[:, topk_group:]
        group_mask = torch.zeros(num_tokens, n_group, dtype=torch.bool).scatter_(1, dropped, True)
        choice = grouped.masked_fill(group_mask[..., None], float("-inf")).view(num_tokens, num_experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        total = weights[:, 0].clone()
        for j in range(1, top_k):
            total += weights[:, j]
        weights /= (total + 1e-20)[:, None]
    shared = torch.arange(num_experts, num_experts + num_shared).expand(num_tokens, -1)
    weights = torch.cat([weights.mul_(scaling_factor), torch.ones(num_tokens, num_shared)], dim=1)
    return weights, torch.cat([ids, shared], dim=1).to(torch.int32)


def route_triton(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    num_shared: int = 0,
    softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `route` returns, by one program a token: repeated maxima, no sort."""
    num_tokens, num_experts = router_logits.shape
    num_chosen = top_k + num_shared
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=router_logits.device)
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=router_logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            router_logits,
            router_logits.stride(0),
            router_logits if bias is None else bias,
            weights,
            ids,
            scaling_factor,
            HAS_BIAS=bias is not None,
            SOFTMAX=softmax,
            NORMALISE=norm_topk_prob,
            TOP_K=top_k,
            KEEP_GROUPS=topk_group,
            NUM_GROUPS=n_group,
            GROUP_SIZE=num_experts // n_group,
            GROUPS=triton.next_power_of_2(n_group),
            SIZE=triton.next_power_of_2(num_experts // n_group),
            PICKS=triton.next_power_of_2(num_chosen),
            SHARED=num_shared,
            num_warps=1,
            **pdl(),
        )
    return weights, ids


@triton.jit
def _route_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    scaling_factor,
    HAS_BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    KEEP_GROUPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    exists = (group[:, None] < NUM_GROUPS) & (member[None, :] < GROUP_SIZE)
    LAST: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    expert = tl.where(exists, group[:, None] * GROUP_SIZE + member[None, :], LAST)
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=exists, other=0.0)
    if SOFTMAX:
        highest = tl.max(tl.max(tl.where(exists, logits, float("-inf")), axis=1), axis=0)
        shifted = tl.where(exists, tl.exp(logits - highest), 0.0)
        scores = shifted / tl.sum(tl.sum(shifted, axis=1), axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + expert, mask=exists, other=0.0)
    # What can't be chosen is -inf; what has been chosen is removed from `free`, so that even all -inf gives distinct
    # ids.
    choice = tl.where(exists & (choice == choice), choice, float("-inf"))
    free = exists

    if KEEP_GROUPS < NUM_GROUPS:
        best = tl.max(choice, axis=1)
        at_best = tl.min(tl.where((choice == best[:, None]) & exists, expert, LAST), axis=1)
        group_score = best
        if GROUP_SIZE > 1 and not SOFTMAX:
            group_score = best + tl.max(tl.where(expert == at_best[:, None], float("-inf"), choice), axis=1)
        open_groups = group < NUM_GROUPS
        kept = group < 0
        for _ in tl.static_range(KEEP_GROUPS):
            top = tl.max(tl.where(open_groups, group_score, float("-inf")), axis=0)
            pick = tl.min(tl.where(open_groups & (group_score == top), group, GROUPS), axis=0)
            kept = kept | (group == pick)
            open_groups = open_groups & (group != pick)
        free = free & kept[:, None]

    pick_index = tl.arange(0, PICKS)
    weights = tl.zeros([PICKS], dtype=tl.float32)
    ids = tl.zeros([PICKS], dtype=tl.int32)
    total = 0.0
    for j in tl.static_range(TOP_K):
        top = tl.max(tl.max(tl.where(free, choice, float("-inf")), axis=1), axis=0)
        pick = tl.min(tl.min(tl.where(free & (choice == top), expert, LAST), axis=1), axis=0)
        weight = tl.sum(tl.sum(tl.where(expert == pick, scores, 0.0), axis=1), axis=0)
        total += weight
        weights = tl.where(pick_index == j, weight, weights)
        ids = tl.where(pick_index == j, pick, ids)
        free = free & (expert != pick)
    if NORMALISE:
        weights = weights / (total + 1e-20)
    is_shared = pick_index >= TOP_K
    weights = tl.where(is_shared, 1.0, weights * scaling_factor)
    ids = tl.where(is_shared, LAST + pick_index - TOP_K, ids)
    CHOSEN: tl.constexpr = TOP_K + SHARED
    tl.store(weights_ptr + token * CHOSEN + pick_index, weights, mask=pick_index < CHOSEN)
    tl.store(ids_ptr + token * CHOSEN + pick_index, ids, mask=pick_index < CHOSEN)
