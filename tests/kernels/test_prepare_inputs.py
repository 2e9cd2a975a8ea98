"""A step's inputs: by hand, against a scalar oracle, kernel against twin."""

import pytest
import torch

from specgen.kernels.prepare_inputs import StepInputs, prepare_inputs, prepare_inputs_torch, prepare_inputs_triton

State = dict[str, torch.Tensor]


def make(num_reqs: int, num_drafts: int, longest: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Requests whose queries start anywhere up to the last committed token, with padded rows in between."""
    generator = torch.Generator().manual_seed(num_reqs * 13 + num_drafts)
    num_slots, max_model_len = num_reqs + 2, 3 * longest
    slots = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
    slots[3::6] = -1
    query_lens = torch.randint(1, longest + 1, (num_reqs,), generator=generator)
    query_lens[slots < 0] = 0
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).int()
    total_len = torch.randint(1, max_model_len + 1, (num_slots,), generator=generator).int()
    return (
        slots,
        bounds,
        {
            "token_ids": torch.randint(0, 1000, (num_slots, max_model_len), generator=generator).int(),
            "total_len": total_len,
            "num_computed_tokens": (total_len - torch.randint(1, longest + 1, (num_slots,), generator=generator))
            .clamp(min=0)
            .int(),
            "draft_tokens": torch.randint(-1, 1000, (num_slots, num_drafts), generator=generator),
            "block_tables": torch.randperm(num_slots * (max_model_len // block_size), generator=generator)
            .view(num_slots, -1)
            .int(),
        },
    )


def by_lists(slots: torch.Tensor, bounds: torch.Tensor, num_tokens: int, state: State, block_size: int) -> StepInputs:
    ids, positions, kv_slots, seq_lens = [0] * num_tokens, [0] * num_tokens, [-1] * num_tokens, [0] * len(slots)
    for req, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        computed, total = int(state["num_computed_tokens"][slot]), int(state["total_len"][slot])
        start, end = int(bounds[req]), int(bounds[req + 1])
        seq_lens[req] = computed + end - start
        table = state["block_tables"][slot].tolist()
        sequence = state["token_ids"][slot].tolist()[:total] + state["draft_tokens"][slot].tolist() + [-1] * num_tokens
        for row in range(start, end):
            p = positions[row] = computed + row - start
            ids[row] = sequence[p]
            if p // block_size < len(table) and table[p // block_size]:
                kv_slots[row] = table[p // block_size] * block_size + p % block_size
    return StepInputs(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(seq_lens, dtype=torch.int32), torch.tensor(kv_slots)
    )


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize(("num_reqs", "longest", "padding"), [(1, 1, 0), (13, 9, 5), (5, 600, 16)])
def test_kernel_and_twin_follow_the_oracle(
    kernel_device: str, num_reqs: int, longest: int, padding: int, num_drafts: int
) -> None:
    slots, bounds, state = make(num_reqs, num_drafts, longest, 3)
    num_tokens = int(bounds[-1]) + padding
    wanted = by_lists(slots, bounds, num_tokens, state, 3)
    twin = prepare_inputs(slots, bounds, num_tokens, **state, block_size=3)
    on_device = {name: tensor.to(kernel_device) for name, tensor in state.items()}
    kernel = prepare_inputs_triton(
        slots.to(kernel_device), bounds.to(kernel_device), num_tokens, **on_device, block_size=3
    )
    for name in StepInputs._fields:
        for got in (getattr(twin, name), getattr(kernel, name).cpu()):
            assert got.dtype == getattr(wanted, name).dtype, name
            assert torch.equal(got, getattr(wanted, name)), name


def test_by_hand() -> None:
    state = {
        "token_ids": torch.tensor([[10, 11, 12, 13, 14, 0], [20, 21, 22, 0, 0, 0]], dtype=torch.int32),
        "total_len": torch.tensor([5, 3], dtype=torch.int32),
        "num_computed_tokens": torch.tensor([1, 2], dtype=torch.int32),
        "draft_tokens": torch.tensor([[7, 8], [30, -1]]),
        "block_tables": torch.tensor([[4, 0], [6, 3]], dtype=torch.int32),
    }
    # Slot 1 decodes with two drafts and one row more; slot 0 prefills a chunk of 2, the second without a block.
    slots, bounds = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    inputs = prepare_inputs(slots, bounds, 8, **state, block_size=2)
    assert inputs.input_ids.tolist() == [22, 30, -1, -1, 11, 12, 0, 0]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 1, 2, 0, 0]
    assert inputs.seq_lens.tolist() == [6, 0, 3]
    assert inputs.slot_mapping.tolist() == [6, 7, -1, -1, 9, -1, -1, -1]


def test_only_padding(kernel_device: str) -> None:
    _, _, state = make(2, 3, 4, 3)
    slots, bounds = torch.full((2,), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for op, device in ((prepare_inputs_torch, "cpu"), (prepare_inputs_triton, kernel_device)):
        on_device = {name: tensor.to(device) for name, tensor in state.items()}
        inputs = op(slots.to(device), bounds.to(device), 4, **on_device, block_size=3)
        assert inputs.slot_mapping.tolist() == [-1] * 4
        assert inputs.seq_lens.tolist() == [0, 0]


def test_wrong_arguments_are_refused() -> None:
    slots, bounds, state = make(2, 3, 4, 3)
    with pytest.raises(ValueError, match="query_start_loc: expected shape"):
        prepare_inputs(slots, bounds[:-1], 8, **state, block_size=3)
