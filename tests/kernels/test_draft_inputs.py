"""The drafter's inputs: by hand, against scalar oracles, kernel against twin."""

import pytest
import torch

from specgen.kernels.draft_inputs import (
    DraftDecode,
    DraftPrefill,
    prepare_draft_decode,
    prepare_draft_decode_triton,
    prepare_draft_prefill,
    prepare_draft_prefill_torch,
    prepare_draft_prefill_triton,
)

Prefill = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_prefill(num_reqs: int, longest: int, padding: int) -> tuple[Prefill, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(num_reqs * 17 + longest)
    num_slots, max_model_len = num_reqs + 2, longest + 5
    slots = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
    slots[4::7] = -1
    query_lens = torch.randint(1, longest + 1, (num_reqs,), generator=generator)
    query_lens[slots < 0] = 0
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).int()
    num_tokens = int(bounds[-1]) + padding
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    for req in range(num_reqs):  # some end at the last position the model has
        first = int(torch.randint(0, max_model_len - int(query_lens[req]) + 1, (), generator=generator))
        positions[bounds[req] : bounds[req + 1]] = first + torch.arange(int(query_lens[req]))
    num_sampled = torch.randint(0, 4, (num_reqs,), generator=generator).int()
    num_rejected = (torch.rand(num_reqs, generator=generator) * query_lens).int() * (num_sampled > 0)
    ids = torch.randint(-1, 1000, (num_tokens,), generator=generator)
    kv_slots = torch.randint(-1, 1000, (num_tokens,), generator=generator)
    state = {
        "last_sampled": torch.randint(0, 1000, (num_slots,), generator=generator),
        "token_ids": torch.randint(0, 1000, (num_slots, max_model_len), generator=generator).int(),
    }
    return (slots, bounds, ids, positions, kv_slots, num_sampled, num_rejected), state


def prefill_by_lists(call: Prefill, state: dict[str, torch.Tensor]) -> DraftPrefill:
    slots, bounds, ids, positions, kv_slots, num_sampled, num_rejected = (x.tolist() for x in call)
    out_ids, out_slots = [0] * len(ids), [-1] * len(ids)
    last_indices, base_positions = [0] * len(slots), [positions[0]] * len(slots)
    for req, slot in enumerate(slots):
        if slot < 0:
            continue
        start, end = bounds[req], bounds[req + 1] - num_rejected[req]
        position = positions[end - 1]
        known = state["token_ids"][slot].tolist()
        following = known[position + 1] if position + 1 < len(known) else 0
        if num_sampled[req] > 0:
            following = int(state["last_sampled"][slot])
        out_ids[start:end] = [*ids[start + 1 : end], following]
        out_slots[start:end] = kv_slots[start:end]
        last_indices[req], base_positions[req] = end - 1, position
    return DraftPrefill(*(torch.tensor(x) for x in (out_ids, out_slots, last_indices, base_positions)))


@pytest.mark.parametrize(("num_reqs", "longest", "padding"), [(1, 1, 0), (13, 9, 5), (5, 700, 16)])
def test_prefill_kernel_and_twin_follow_the_oracle(
    kernel_device: str, num_reqs: int, longest: int, padding: int
) -> None:
    call, state = make_prefill(num_reqs, longest, padding)
    wanted = prefill_by_lists(call, state)
    twin = prepare_draft_prefill(*call, **state)
    on_device = {name: tensor.to(kernel_device) for name, tensor in state.items()}
    kernel = prepare_draft_prefill_triton(*(x.to(kernel_device) for x in call), **on_device)
    for name in DraftPrefill._fields:
        for got in (getattr(twin, name), getattr(kernel, name).cpu()):
            assert got.dtype == torch.int64, name
            assert torch.equal(got, getattr(wanted, name)), name


def test_prefill_by_hand() -> None:
    slots, bounds = torch.tensor([0, 1, -1, 2], dtype=torch.int32), torch.tensor([0, 4, 6, 6, 7], dtype=torch.int32)
    ids = torch.tensor([40, 41, 42, -1, 50, 51, 60, 0])
    positions = torch.tensor([7, 8, 9, 10, 0, 1, 11, 0])
    kv_slots = torch.tensor([107, 108, 109, 110, 200, 201, 311, -1])
    counts = torch.tensor([2, 0, 0, 0], dtype=torch.int32)
    state = {
        "last_sampled": torch.tensor([99, 98, 97]),
        "token_ids": (torch.arange(3)[:, None] * 100 + torch.arange(12)).int(),
    }
    # Slot 0: two of three drafts rejected. Slot 1: an unfinished prefill. Slot 2: the same at the very end of its row.
    out = prepare_draft_prefill(slots, bounds, ids, positions, kv_slots, counts, counts, **state)
    assert out.input_ids.tolist() == [41, 99, 0, 0, 51, 102, 0, 0]
    assert out.slot_mapping.tolist() == [107, 108, -1, -1, 200, 201, 311, -1]
    assert out.last_indices.tolist() == [1, 5, 0, 6]
    assert out.base_positions.tolist() == [8, 1, 7, 11]


def test_prefill_of_padding_alone(kernel_device: str) -> None:
    call, state = make_prefill(1, 1, 0)
    none = (
        torch.tensor([-1], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *(torch.zeros(3, dtype=torch.int64),) * 3,
    )
    for op, device in ((prepare_draft_prefill_torch, "cpu"), (prepare_draft_prefill_triton, kernel_device)):
        on_device = {name: tensor.to(device) for name, tensor in state.items()}
        out = op(*(x.to(device) for x in (*none, *call[5:])), **on_device)
        assert out.slot_mapping.tolist() == [-1] * 3
        assert out.last_indices.tolist() == [0]


def make_decode(num_reqs: int, num_drafts: int, max_model_len: int, block_size: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_reqs * 19 + num_drafts)
    slots = torch.randperm(num_reqs + 2, generator=generator)[:num_reqs].int()
    slots[2::5] = -1
    base = torch.randint(0, max_model_len, (num_reqs,), generator=generator)
    drafts = torch.randint(0, 1000, (num_reqs, num_drafts), generator=generator)
    max_blocks = -(-max_model_len // block_size)
    tables = torch.randperm((num_reqs + 2) * max_blocks, generator=generator).view(num_reqs + 2, max_blocks).int()
    return slots, base, drafts, tables


@pytest.mark.parametrize(("step", "width"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_decode_kernel_and_twin_follow_the_oracle(kernel_device: str, step: int, width: int) -> None:
    max_model_len, block_size = 11, 3
    slots, base, drafts, tables = make_decode(23, 4, max_model_len, block_size)
    ids, positions, kv_slots, seq_lens = [], [], [], []
    for req, slot in enumerate(slots.tolist()):
        seq_lens.append(min(int(base[req]) + step + 1, max_model_len) if slot >= 0 else 0)
        for j in range(width):
            i = step - width + 1 + j
            ahead = int(base[req]) + i
            position = min(ahead, max_model_len - 1)
            block = int(tables[slot, position // block_size])
            kv_slot = block * block_size + position % block_size if block else -1
            ids.append(int(drafts[req, i - 1]) if slot >= 0 else 0)
            positions.append(position if slot >= 0 else 0)
            kv_slots.append(kv_slot if slot >= 0 and ahead < max_model_len else -1)
    wanted = DraftDecode(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(kv_slots), torch.tensor(seq_lens).int()
    )
    twin = prepare_draft_decode(step, width, slots, base, drafts, tables, block_size, max_model_len)
    on_device = (x.to(kernel_device) for x in (slots, base, drafts, tables))
    kernel = prepare_draft_decode_triton(step, width, *on_device, block_size, max_model_len)
    for name in DraftDecode._fields:
        for got in (getattr(twin, name), getattr(kernel, name).cpu()):
            assert got.dtype == getattr(wanted, name).dtype, name
            assert torch.equal(got, getattr(wanted, name)), name


def test_decode_by_hand() -> None:
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    base, drafts = torch.tensor([3, 5, 6]), torch.tensor([[70, 71, 72], [80, 81, 82], [90, 91, 92]])
    tables = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    out = prepare_draft_decode(2, 2, slots, base, drafts, tables, 4, 8)
    assert out.input_ids.tolist() == [70, 71, 0, 0, 90, 91]
    assert out.positions.tolist() == [4, 5, 0, 0, 7, 7]
    assert out.slot_mapping.tolist() == [32, 33, -1, -1, 27, -1]
    assert out.seq_lens.tolist() == [6, 0, 8]


def test_wrong_arguments_are_refused() -> None:
    slots, base, drafts, tables = make_decode(3, 2, 8, 4)
    with pytest.raises(ValueError, match="1 <= width <= step <= 2"):
        prepare_draft_decode(3, 1, slots, base, drafts, tables, 4, 8)
    with pytest.raises(ValueError, match="drafts: expected dtype"):
        prepare_draft_decode(1, 1, slots, base, drafts.int(), tables, 4, 8)
    call, state = make_prefill(2, 3, 0)
    with pytest.raises(ValueError, match="positions: expected shape"):
        prepare_draft_prefill(*call[:3], call[3][:-1], *call[4:], **state)
