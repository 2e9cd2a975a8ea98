"""Strict verification: hand-written tables, a scalar oracle, kernel against twin."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from specgen.kernels.penalties import id_mask_of
from specgen.kernels.rejection import (
    get_num_sampled_and_rejected,
    get_num_sampled_and_rejected_torch,
    get_num_sampled_and_rejected_triton,
    live_slots,
    live_slots_torch,
    live_slots_triton,
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


class Slots(NamedTuple):
    """Per-slot state, as the kernel is given it."""

    prefill_len: torch.Tensor
    total_len: torch.Tensor
    max_total_len: torch.Tensor
    end_mask: torch.Tensor
    finished: torch.Tensor

    def to(self, device: str) -> "Slots":
        return Slots(*(tensor.clone().to(device) for tensor in self))


def slots_of(prefill: list[int], total: list[int], longest: list[int], ends: list[list[int]], vocab: int) -> Slots:
    masks = torch.from_numpy(np.stack([id_mask_of(ids, vocab) for ids in ends]))
    lens = (torch.tensor(values, dtype=torch.int32) for values in (prefill, total, longest))
    return Slots(*lens, masks, torch.zeros(len(prefill), dtype=torch.int32))


NEVER = 2**31 - 1


def test_counts_by_hand(kernel_device: str) -> None:
    sampled = torch.tensor([[5, 6, 7, 8], [5, -1, -1, -1], [5, 6, -1, -1], *[[5, -1, -1, -1]] * 2, [5, 6, 7, -1]])
    num_sampled = torch.tensor([4, 1, 2, 1, 1, 3], dtype=torch.int32)
    cu_num_logits = torch.tensor([0, 4, 8, 12, 13, 14, 18], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1, 3, 4, -1], dtype=torch.int32)
    seq_lens = torch.tensor([9, 9, 9, 19, 20, 0], dtype=torch.int32)  # slot 3 is inside its prefill, slot 4 just done
    state = slots_of([5, 5, 5, 20, 20], [6] * 5, [NEVER] * 5, [[], [8], [], [5], []], 70)
    inputs = (sampled, num_sampled, seq_lens, cu_num_logits, slots)
    counted, rejected = get_num_sampled_and_rejected(*inputs, **state._asdict())
    assert counted.tolist() == [4, 1, 2, 0, 1, 0]
    assert rejected.tolist() == [0, 3, 2, 0, 0, 0]
    assert counted.dtype == rejected.dtype == torch.int32
    assert num_sampled.tolist() == [4, 1, 2, 1, 1, 3] and not state.finished.any()
    on_device = state.to(kernel_device)
    got = get_num_sampled_and_rejected_triton(*(x.to(kernel_device) for x in inputs), **on_device._asdict())
    assert torch.equal(got[0].cpu(), counted)
    assert torch.equal(got[1].cpu(), rejected)
    assert not on_device.finished.any()


def test_a_row_ends_with_its_first_end_id_or_its_last_token() -> None:
    sampled = torch.tensor([[5, 64, 7, 8], [5, 64, 7, 8], [5, 64, 7, 8], [5, 64, -1, -1], [64, 5, 64, 7]])
    num_sampled = torch.tensor([4, 4, 4, 2, 4], dtype=torch.int32)
    state = slots_of([3] * 5, [6, 6, 6, 6, 6], [NEVER, 9, 8, NEVER, 7], [[64, 7], [], [8], [7], [64]], 70)
    counted, rejected = get_num_sampled_and_rejected(
        sampled,
        num_sampled,
        torch.full((5,), 9, dtype=torch.int32),
        torch.arange(6, dtype=torch.int32) * 4,
        torch.arange(5, dtype=torch.int32),
        **state._asdict(),
    )
    assert counted.tolist() == [2, 3, 2, 2, 1]
    assert rejected.tolist() == [2, 1, 2, 2, 3]
    assert state.finished.tolist() == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_counts_of_kernel_and_twin_follow_the_rule(kernel_device: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_reqs, num_slots, vocab = 61, 80, 45
    sampled, num_sampled = draw(0, vocab, num_reqs, width), draw(1, width + 1, num_reqs).int()
    slots = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
    slots[draw(0, num_reqs, 7)] = -1
    rows = draw(0, 3, num_reqs) + num_sampled
    bounds = torch.cat([torch.zeros(1), rows.cumsum(0)]).int()
    seq_lens = draw(1, 9, num_reqs).int()
    ends = [draw(0, vocab, int(draw(0, 6, 1))).tolist() for _ in range(num_slots)]
    total = draw(5, 9, num_slots)
    state = slots_of([4] * num_slots, total.tolist(), (total + draw(1, 6, num_slots)).tolist(), ends, vocab)

    want, finished = [], [0] * num_slots
    for req, slot in enumerate(slots.tolist()):
        counts = 0
        if slot >= 0 and int(seq_lens[req]) >= 4:
            for token in sampled[req, : int(num_sampled[req])].tolist():
                counts += 1
                if token in ends[slot] or int(total[slot]) + counts == int(state.max_total_len[slot]):
                    finished[slot] = 1
                    break
        want.append((counts, int(rows[req]) - counts if counts else 0))
    assert 5 < sum(finished) < 50
    inputs = (sampled, num_sampled, seq_lens, bounds, slots)
    for op, device in (
        (get_num_sampled_and_rejected_torch, "cpu"),
        (get_num_sampled_and_rejected_triton, kernel_device),
    ):
        own = state.to(device)
        got = op(*(x.to(device) for x in inputs), **own._asdict())
        assert list(zip(*(x.tolist() for x in got), strict=True)) == want
        assert own.finished.tolist() == finished


def test_a_finished_slot_is_a_padded_row(kernel_device: str) -> None:
    slots = torch.tensor([3, -1, 0, 2, 3, 1] * 50, dtype=torch.int32)
    finished = torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32)
    for op, device in ((live_slots_torch, "cpu"), (live_slots_triton, kernel_device), (live_slots, kernel_device)):
        assert op(slots.to(device), finished.to(device)).tolist() == [-1, -1, 0, 2, -1, -1] * 50
    assert live_slots_triton(slots[:0].to(kernel_device), finished.to(kernel_device)).shape == (0,)


def test_no_requests(kernel_device: str) -> None:
    none, zero = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for op, device in ((rejection_sample_torch, "cpu"), (rejection_sample_triton, kernel_device)):
        sampled, num_sampled = op(none.long().to(device), none.long().to(device), zero.to(device), 3)
        assert sampled.shape == (0, 4)
        assert num_sampled.shape == (0,)
    state = slots_of([1, 1], [1, 1], [9, 9], [[], []], 5)
    for count in (get_num_sampled_and_rejected_torch, get_num_sampled_and_rejected_triton):
        no_tokens = torch.zeros(0, 4, dtype=torch.int64)
        assert count(no_tokens, none, none, zero, none, **state._asdict())[1].shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    target, ids, bounds = step_of([([1], [])])
    with pytest.raises(ValueError, match="draft_ids: expected dtype"):
        rejection_sample(target, ids.int(), bounds, 1)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        rejection_sample(target, ids, bounds, -1)
