"""Strict verification: hand-written tables, a scalar oracle, kernel against twin."""

import pytest
import torch

from specgen.kernels.rejection import (
    get_num_sampled_and_rejected,
    get_num_sampled_and_rejected_torch,
    get_num_sampled_and_rejected_triton,
    rejection_sample,
    rejection_sample_torch,
    rejection_sample_triton,
)


def verify_one(target: list[int], drafts: list[int]) -> list[int]:
    """The rule, read aloud: `target` has one token more than there are drafts."""
    emitted = []
    for token, draft in zip(target, [*drafts, None], strict=True):
        emitted.append(token)
        if draft != token or draft == -1:
            break
    return emitted


def step_of(requests: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flatten (target tokens, drafts) into logits rows; the last sampled id (here 999) is in front of the drafts."""
    target = [token for tokens, _ in requests for token in tokens]
    ids = [token for tokens, drafts in requests for token in ([999, *drafts] if tokens else [])]
    bounds = [0]
    for tokens, _ in requests:
        bounds.append(bounds[-1] + len(tokens))
    return torch.tensor(target, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64), torch.tensor(bounds).int()


def test_by_hand() -> None:
    inputs = step_of(
        [
            ([5, 6, 7, 8], [5, 6, 7]),  # all accepted: the bonus follows
            ([5, 6, 7, 8], [4, 6, 7]),  # the first rejected: later equal ones don't count
            ([5, 6, 7, 8], [5, 6, 9]),
            ([5], []),  # no drafts
            ([5, 6, 7, 8], [5, -1, -1]),  # placeholders
            ([], []),  # a padded request
            ([0, 1], [0]),
        ]
    )
    sampled, num_sampled = rejection_sample(*inputs, 3)
    assert sampled.tolist() == [
        [5, 6, 7, 8],
        [5, -1, -1, -1],
        [5, 6, 7, -1],
        [5, -1, -1, -1],
        [5, 6, -1, -1],
        [-1, -1, -1, -1],
        [0, 1, -1, -1],
    ]
    assert num_sampled.tolist() == [4, 1, 3, 1, 2, 0, 2]
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)


def test_a_placeholder_is_rejected_even_if_the_target_says_minus_one() -> None:
    inputs = step_of([([-1, 4], [-1])])
    assert rejection_sample(*inputs, 1)[1].tolist() == [1]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("num_reqs", [1, 7, 64])
def test_kernel_and_twin_follow_the_rule(kernel_device: str, num_drafts: int, num_reqs: int) -> None:
    generator = torch.Generator().manual_seed(num_reqs * 7 + num_drafts)
    requests = []
    for _ in range(num_reqs):
        count = int(torch.randint(-1, num_drafts + 1, (), generator=generator))
        target = torch.randint(0, 2, (count + 1,), generator=generator).tolist()
        requests.append((target, torch.randint(-1, 2, (max(count, 0),), generator=generator).tolist()))
    # Rows past the last request (a graph's padding) belong to nobody.
    rows, ids, bounds = step_of(requests)
    rows, ids = torch.cat([rows, torch.tensor([7, 7])]), torch.cat([ids, torch.tensor([7, 7])])

    sampled, num_sampled = rejection_sample_torch(rows, ids, bounds, num_drafts)
    for req, (tokens, drafts) in enumerate(requests):
        emitted = verify_one(tokens, drafts) if tokens else []
        assert sampled[req].tolist() == emitted + [-1] * (num_drafts + 1 - len(emitted))
        assert int(num_sampled[req]) == len(emitted)
    got = rejection_sample_triton(*(x.to(kernel_device) for x in (rows, ids, bounds)), num_drafts)
    assert torch.equal(got[0].cpu(), sampled)
    assert torch.equal(got[1].cpu(), num_sampled)


def test_counts_by_hand(kernel_device: str) -> None:
    num_sampled = torch.tensor([4, 1, 2, 1, 1, 3], dtype=torch.int32)
    cu_num_logits = torch.tensor([0, 4, 8, 12, 13, 14, 18], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1, 3, 4, -1], dtype=torch.int32)
    prefill_len = torch.tensor([5, 5, 5, 20, 20], dtype=torch.int32)
    seq_lens = torch.tensor([9, 9, 9, 19, 20, 0], dtype=torch.int32)  # slot 3 is inside its prefill, slot 4 just done
    inputs = (num_sampled, seq_lens, cu_num_logits, slots, prefill_len)
    sampled, rejected = get_num_sampled_and_rejected(*inputs)
    assert sampled.tolist() == [4, 1, 2, 0, 1, 0]
    assert rejected.tolist() == [0, 3, 2, 0, 0, 0]
    assert sampled.dtype == rejected.dtype == torch.int32
    assert num_sampled.tolist() == [4, 1, 2, 1, 1, 3]
    got = get_num_sampled_and_rejected_triton(*(x.to(kernel_device) for x in inputs))
    assert torch.equal(got[0].cpu(), sampled)
    assert torch.equal(got[1].cpu(), rejected)


def test_no_requests(kernel_device: str) -> None:
    none, zero = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for op, device in ((rejection_sample_torch, "cpu"), (rejection_sample_triton, kernel_device)):
        sampled, num_sampled = op(none.long().to(device), none.long().to(device), zero.to(device), 3)
        assert sampled.shape == (0, 4)
        assert num_sampled.shape == (0,)
    for count in (get_num_sampled_and_rejected_torch, get_num_sampled_and_rejected_triton):
        assert count(none, none, zero, none, torch.zeros(2, dtype=torch.int32))[1].shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    target, ids, bounds = step_of([([1], [])])
    with pytest.raises(ValueError, match="draft_ids: expected dtype"):
        rejection_sample(target, ids.int(), bounds, 1)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        rejection_sample(target, ids, bounds, -1)
