"""Expert choice: transformers' router, ties, biases, NaN, kernel against twin, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from specgen.kernels.moe_routing import route, route_torch, route_triton

# experts, groups, groups kept, top k: the bundled model, 16B, DeepSeek-V3, and an odd one.
LAYOUTS = [(8, 2, 1, 2), (64, 1, 1, 6), (256, 8, 4, 8), (15, 3, 2, 5)]


@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), LAYOUTS)
@pytest.mark.parametrize("normalise", [True, False])
def test_twin_is_transformers(experts: int, groups: int, kept: int, top_k: int, normalise: bool) -> None:
    torch.manual_seed(experts)
    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(std=0.1)
    logits, want_weights, want_ids = router(torch.randn(99, 16))
    weights, ids = route(logits.detach(), router.e_score_correction_bias, top_k, groups, kept, normalise, 2.5)
    want_ids, order = want_ids.sort(dim=-1)
    got_ids, got_order = ids.long().sort(dim=-1)
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(weights.gather(1, got_order), want_weights.detach().gather(1, order))
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("use_kernel", [False, True])
def test_by_hand(kernel_device: str, use_kernel: bool) -> None:
    run, device = (route_triton, kernel_device) if use_kernel else (route_torch, "cpu")
    nan = torch.nan
    logits = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # all equal: the lowest ids
            [9.0, -9.0, 2.0, 2.0, 1.0, 1.0],  # groups by the sum of two: the second wins over the best single
            [0.0, nan, 1.0, 1.0, 3.0, nan],  # a NaN's group never wins
            [nan, nan, nan, nan, nan, nan],  # ids stay valid and distinct
        ],
        device=device,
    )
    weights, ids = run(logits, None, 2, 3, 1, True, 2.0)
    assert ids.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert weights[:3].tolist() == [[1.0, 1.0]] * 3
    # The bias chooses, and stays out of the weight.
    weights, ids = run(logits[:1], torch.tensor([0, 0, 0, 0, 0, 1.0], device=device), 1, 1, 1, False, 3.0)
    assert (ids.tolist(), weights.tolist()) == ([[5]], [[1.5]])


@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), LAYOUTS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_kernel_is_the_twin_with_many_ties(
    kernel_device: str, experts: int, groups: int, kept: int, top_k: int, with_bias: bool
) -> None:
    torch.manual_seed(experts)
    # Quarters, so that scores and their sums with the bias tie often; values and NaN too.
    logits = torch.randint(-4, 5, (13, experts)) / 4.0
    logits[7, ::3] = torch.nan
    bias = torch.zeros(experts) if with_bias else None
    want_weights, want_ids = route_torch(logits, bias, top_k, groups, kept, True, 2.5)
    device_bias = None if bias is None else bias.to(kernel_device)
    weights, ids = route_triton(logits.to(kernel_device), device_bias, top_k, groups, kept, True, 2.5)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, equal_nan=True)


@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), LAYOUTS)
def test_a_row_alone_is_the_row_in_company(
    threads: int,
    row_subsets: Callable[[int], Iterator[torch.Tensor]],
    experts: int,
    groups: int,
    kept: int,
    top_k: int,
) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(301, experts), torch.randn(experts) * 0.1
    weights, ids = route(logits, bias, top_k, groups, kept, True, 2.5)
    for rows in row_subsets(301):
        part_weights, part_ids = route(logits[rows], bias, top_k, groups, kept, True, 2.5)
        assert torch.equal(part_weights, weights[rows])
        assert torch.equal(part_ids, ids[rows])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="equal groups"):
        route(torch.zeros(1, 8), None, 1, 3, 1, True, 1.0)
    with pytest.raises(ValueError, match="top_k 5"):
        route(torch.zeros(1, 8), None, 5, 2, 1, True, 1.0)
    with pytest.raises(ValueError, match="router_logits: expected dtype"):
        route(torch.zeros(1, 8, dtype=torch.bfloat16), None, 1, 1, 1, True, 1.0)


@pytest.mark.parametrize("use_kernel", [False, True])
def test_shared_experts_come_last_with_weight_one(kernel_device: str, use_kernel: bool) -> None:
    run, device = (route_triton, kernel_device) if use_kernel else (route_torch, "cpu")
    logits = torch.randn(5, 8, device=device)
    weights, ids = run(logits, None, 2, 1, 1, True, 2.5, 3)
    routed_weights, routed_ids = run(logits, None, 2, 1, 1, True, 2.5)
    assert torch.equal(weights[:, :2], routed_weights) and torch.equal(ids[:, :2], routed_ids)
    assert weights[:, 2:].tolist() == [[1.0, 1.0, 1.0]] * 5
    assert ids[:, 2:].tolist() == [[8, 9, 10]] * 5


@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [*LAYOUTS, (128, 1, 1, 8), (160, 8, 3, 6)])
def test_softmax_scores(kernel_device: str, experts: int, groups: int, kept: int, top_k: int) -> None:
    """A group counts by its one best expert; kernel and twin agree, also where logits tie."""
    torch.manual_seed(experts)
    logits = torch.cat([torch.randn(20, experts), torch.randint(-4, 5, (9, experts)) / 4.0])
    weights, ids = route_torch(logits, None, top_k, groups, kept, True, 1.5, 0, True)
    for row in range(20):
        probs = logits[row].double().softmax(-1)
        best = probs.view(groups, -1).amax(-1).topk(kept).indices.tolist()
        size = experts // groups
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -float(probs[e]))[:top_k]
        assert ids[row].tolist() == chosen
        torch.testing.assert_close(weights[row].double(), probs[chosen] / probs[chosen].sum() * 1.5, rtol=1e-5, atol=0)
    got_weights, got_ids = route_triton(logits.to(kernel_device), None, top_k, groups, kept, True, 1.5, 0, True)
    assert torch.equal(got_ids.cpu(), ids)
    torch.testing.assert_close(got_weights.cpu(), weights)


def test_softmax_of_a_row_alone_is_the_row_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]
) -> None:
    logits = torch.randn(301, 127)
    weights, ids = route(logits, None, 8, 1, 1, False, 1.0, 0, True)
    for rows in row_subsets(301):
        part_weights, part_ids = route(logits[rows], None, 8, 1, 1, False, 1.0, 0, True)
        assert torch.equal(part_weights, weights[rows])
        assert torch.equal(part_ids, ids[rows])
