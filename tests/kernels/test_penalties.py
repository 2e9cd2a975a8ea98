"""Penalties: by hand, against a scalar oracle, the law."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from specgen.kernels.penalties import apply_penalties, id_mask_of

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
State = dict[str, torch.Tensor]


def make(num_rows: int, vocab: int) -> tuple[Call, State]:
    """A third of the slots neutral, a few rows padded; drafts from few ids, some of them placeholders."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    num_slots = num_rows // 2 + 2
    slots = torch.randint(0, num_slots, (num_rows,), generator=generator).int()
    slots[3::8] = -1
    spec_ids = torch.randint(-1, min(vocab, 9), (3 * num_rows + 1,), generator=generator)
    spec_count = torch.randint(0, 4, (num_rows,), generator=generator).int()
    spec_start = torch.randint(0, 3 * num_rows - 2, (num_rows,), generator=generator).int()
    prompts = torch.randint(0, vocab, (num_slots, 20), generator=generator).numpy()
    state = {
        "prompt_mask": torch.from_numpy(np.stack([id_mask_of(prompt, vocab) for prompt in prompts])),
        "output_counts": torch.randint(-9, 4, (num_slots, vocab), generator=generator).clamp(min=0).int(),
        "repetition_penalty": torch.rand(num_slots, generator=generator) + 0.5,
        "frequency_penalty": torch.randn(num_slots, generator=generator),
        "presence_penalty": torch.randn(num_slots, generator=generator),
    }
    for name, neutral in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0)):
        state[name][::3] = neutral
    return (torch.randn(num_rows, vocab, generator=generator) * 3, slots, spec_ids, spec_start, spec_count), state


def penalise(call: Call, state: State) -> torch.Tensor:
    """One (row, token) at a time, in float32."""
    logits, slots, spec_ids, spec_start, spec_count = call
    out = logits.clone().numpy()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        start = int(spec_start[row])
        drafts = spec_ids[start : start + int(spec_count[row])].tolist()
        repetition, frequency, presence = (
            state[name][slot].numpy() for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        )
        for token in range(logits.shape[1]):
            count = int(state["output_counts"][slot, token]) + drafts.count(token)
            in_prompt = int(state["prompt_mask"][slot, token // 32]) >> (token % 32) & 1
            if in_prompt or count:
                out[row, token] = out[row, token] / repetition if out[row, token] > 0 else out[row, token] * repetition
            out[row, token] -= frequency * np.float32(count)
            out[row, token] -= presence * np.float32(count > 0)
    return torch.from_numpy(out)


def test_prompt_mask() -> None:
    mask = id_mask_of([0, 31, 32, 69, 69, 70, -1], 70)  # 70 and -1 lie outside
    assert mask.dtype == np.int32
    assert mask.tolist() == [1 - 2**31, 1, 1 << 5]
    assert id_mask_of(np.array([], dtype=np.int32), 33).tolist() == [0, 0]


def test_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, 0.0]] * 3)
    call = (
        logits,
        torch.tensor([0, 0, 1], dtype=torch.int32),
        torch.tensor([9, 3, 3, -1]),
        torch.tensor([1, 1, 1], dtype=torch.int32),
        torch.tensor([0, 3, 3], dtype=torch.int32),
    )
    one, zero = torch.ones(2), torch.zeros(2)
    state = {
        "prompt_mask": torch.tensor([[0b00011], [0b11111]], dtype=torch.int32),
        "output_counts": torch.tensor([[0, 0, 2, 0, 0], [5, 5, 5, 5, 5]], dtype=torch.int32),
        "repetition_penalty": one + torch.tensor([1.0, 0.0]),
        "frequency_penalty": zero + torch.tensor([0.5, 0.0]),
        "presence_penalty": zero + torch.tensor([0.25, 0.0]),
    }
    apply_penalties(*call, **state)
    assert logits.tolist() == [
        [1.0, -4.0, 2.0 - 1.0 - 0.25, 1.0, 0.0],  # no drafts; the prompt's tokens feel repetition only
        [1.0, -4.0, 2.0 - 1.0 - 0.25, 0.5 - 1.0 - 0.25, 0.0],  # the draft 3 twice
        [2.0, -2.0, 4.0, 1.0, 0.0],  # neutral
    ]


def test_twin_follows_the_oracle() -> None:
    call, state = make(24, 101)
    wanted = penalise(call, state)
    apply_penalties(*call, **state)
    assert torch.equal(call[0], wanted)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    (logits, slots, spec_ids, start, count), state = make(301, 523)
    whole = logits.clone()
    apply_penalties(whole, slots, spec_ids, start, count, **state)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_penalties(part, slots[rows], spec_ids, start[rows], count[rows], **state)
        assert torch.equal(part, whole[rows])


def test_no_rows_and_no_drafts() -> None:
    (logits, slots, _, start, _), state = make(4, 40)
    call = (logits, slots, torch.zeros(0, dtype=torch.int64), start * 0, start * 0)
    apply_penalties(*call, **state)
    apply_penalties(*(x[:0] for x in call), **state)


def test_wrong_arguments_are_refused() -> None:
    call, state = make(4, 40)
    state["prompt_mask"] = state["prompt_mask"][:, :1]
    with pytest.raises(ValueError, match="prompt_mask: expected shape"):
        apply_penalties(*call, **state)
