"""Committing a step: against a scalar oracle, kernel against twin; nothing else may change."""

import pytest
import torch

from specgen.kernels.post_update import post_update, post_update_torch, post_update_triton

State = dict[str, torch.Tensor]
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_state(num_slots: int, max_model_len: int, vocab: int) -> State:
    generator = torch.Generator().manual_seed(num_slots)
    return {
        "last_sampled": torch.full((num_slots,), -7),
        "total_len": torch.randint(0, max_model_len + 1, (num_slots,), generator=generator).int(),
        "token_ids": torch.full((num_slots, max_model_len), -7, dtype=torch.int32),
        "output_counts": torch.randint(0, 5, (num_slots, vocab), generator=generator).int(),
        "num_computed_tokens": torch.randint(0, 50, (num_slots,), generator=generator).int(),
    }


def make_step(num_reqs: int, num_slots: int, width: int, vocab: int) -> Step:
    generator = torch.Generator().manual_seed(num_reqs * 31 + width)
    slots = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
    slots[2::5] = -1
    query_lens = torch.randint(1, 9, (num_reqs,), generator=generator)
    num_sampled = torch.randint(0, width + 1, (num_reqs,), generator=generator).int()
    sampled = torch.randint(0, vocab, (num_reqs, width), generator=generator)
    sampled[torch.arange(width) >= num_sampled[:, None]] = -1
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).int()
    return slots, bounds, sampled, num_sampled, (query_lens // 2).int()


def commit(step: Step, state: State) -> State:
    """The same by lists."""
    lists = {name: tensor.tolist() for name, tensor in state.items()}
    slots, bounds, sampled, num_sampled, num_rejected = (x.tolist() for x in step)
    for req, slot in enumerate(slots):
        if slot < 0:
            continue
        for token in sampled[req][: num_sampled[req]]:
            if lists["total_len"][slot] < len(lists["token_ids"][slot]):
                lists["token_ids"][slot][lists["total_len"][slot]] = token
            lists["total_len"][slot] += 1
            lists["output_counts"][slot][token] += 1
            lists["last_sampled"][slot] = token
        lists["num_computed_tokens"][slot] += bounds[req + 1] - bounds[req] - num_rejected[req]
    return {name: torch.tensor(value, dtype=state[name].dtype) for name, value in lists.items()}


@pytest.mark.parametrize(("num_reqs", "width", "max_model_len"), [(1, 1, 20), (13, 4, 6), (64, 6, 33)])
def test_kernel_and_twin_follow_the_oracle(kernel_device: str, num_reqs: int, width: int, max_model_len: int) -> None:
    # A vocabulary of 5 makes one request emit a token twice.
    step, state = make_step(num_reqs, num_reqs + 3, width, 5), make_state(num_reqs + 3, max_model_len, 5)
    wanted = commit(step, state)
    on_device = {name: tensor.to(kernel_device, copy=True) for name, tensor in state.items()}
    post_update(*step, **state)
    post_update_triton(*(x.to(kernel_device) for x in step), **on_device)
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name
        assert torch.equal(on_device[name].cpu(), tensor), name


def test_by_hand() -> None:
    state = {
        "last_sampled": torch.tensor([9, 9]),
        "total_len": torch.tensor([2, 4], dtype=torch.int32),
        "token_ids": torch.zeros(2, 5, dtype=torch.int32),
        "output_counts": torch.zeros(2, 8, dtype=torch.int32),
        "num_computed_tokens": torch.tensor([1, 3], dtype=torch.int32),
    }
    slots, bounds = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
    sampled = torch.tensor([[6, 6, 3, -1], [-1, -1, -1, -1]])
    counts, rejected = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    post_update(slots, bounds, sampled, counts, rejected, **state)
    assert state["last_sampled"].tolist() == [9, 3]
    assert state["total_len"].tolist() == [2, 7]  # beyond the row's end: the host stops the request
    assert state["token_ids"].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 6]]
    assert state["output_counts"].tolist() == [[0] * 8, [0, 0, 0, 1, 0, 0, 2, 0]]
    assert state["num_computed_tokens"].tolist() == [4, 6]


def test_no_requests() -> None:
    none, zero = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for op in (post_update_torch, post_update_triton):
        op(none, zero, torch.zeros(0, 4, dtype=torch.int64), none, none, **make_state(2, 3, 4))


def test_wrong_arguments_are_refused() -> None:
    step, state = make_step(2, 4, 3, 5), make_state(4, 6, 5)
    state["token_ids"] = state["token_ids"].long()
    with pytest.raises(ValueError, match="token_ids: expected dtype"):
        post_update(*step, **state)
