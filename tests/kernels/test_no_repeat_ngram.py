"""No repeated n-grams: transformers' processor over the whole text, the border of committed tokens and drafts."""

import random

import pytest
import torch
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from specgen.kernels.no_repeat_ngram import (
    apply_no_repeat_ngram,
    apply_no_repeat_ngram_torch,
    apply_no_repeat_ngram_triton,
)

VOCAB, LENGTH, K = 11, 40, 4


def make_inputs(seed: int, num_slots: int = 12) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[list[int]]]:
    """Every slot with K + 1 rows over few different ids; the tensors, and the whole text before each row."""
    rng = random.Random(seed)
    total = [rng.randint(1, LENGTH) for _ in range(num_slots)]
    token_ids = torch.tensor([[rng.randrange(5) for _ in range(LENGTH)] for _ in range(num_slots)], dtype=torch.int32)
    spec_ids = torch.tensor([rng.randrange(5) for _ in range(num_slots * (K + 1))])
    slots = torch.arange(num_slots, dtype=torch.int32).repeat_interleave(K + 1)
    local = torch.arange(K + 1, dtype=torch.int32).repeat(num_slots)
    start = slots * (K + 1) + 1
    sizes = torch.tensor([[0, 1, 2, 3, 4, 30][i % 6] for i in range(num_slots)], dtype=torch.int32)
    texts = [
        token_ids[s, : total[s]].tolist() + spec_ids[s * (K + 1) + 1 : s * (K + 1) + 1 + j].tolist()
        for s, j in zip(slots.tolist(), local.tolist(), strict=True)
    ]
    slots[7] = -1
    logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(seed))
    tensors = [logits, slots, spec_ids, start, local]
    return tensors, {"token_ids": token_ids, "total_len": torch.tensor(total).int(), "ngram_size": sizes}, texts


@pytest.mark.parametrize("seed", range(4))
def test_transformers_at_every_draft_position(seed: int, kernel_device: str) -> None:
    (logits, slots, *spec), state, texts = make_inputs(seed)
    want = logits.clone()
    for row, text in enumerate(texts):
        size = int(state["ngram_size"][slots[row]]) if slots[row] >= 0 else 0
        if size:
            want[row] = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), want[row : row + 1])[0]
    assert bool((want == -torch.inf).any())
    for op in (apply_no_repeat_ngram_torch, apply_no_repeat_ngram_triton):
        device = kernel_device if op is apply_no_repeat_ngram_triton else "cpu"
        got = logits.to(device, copy=True)
        op(got, *[t.to(device) for t in (slots, *spec)], **{name: t.to(device) for name, t in state.items()})
        assert torch.equal(got.cpu(), want)


def test_the_border_of_committed_tokens_and_drafts() -> None:
    """1 2 3 was there; 1 is committed and 2 the first draft, or both are drafts: 3 goes. -1 matches nothing."""
    text, drafts = [1, 2, 3, 9, 1], [2, 3, 1, 2]
    state = {"token_ids": torch.zeros(1, 8, dtype=torch.int32), "total_len": torch.tensor([5], dtype=torch.int32)}
    state["token_ids"][0, :5] = torch.tensor(text)
    state["ngram_size"] = torch.tensor([3], dtype=torch.int32)
    slots, start = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    for ids, gone in ((drafts, [[], [3], [9], [], [3]]), ([2, -1, 1, 2], [[], [3], [], [], [3]])):
        logits = torch.zeros(5, VOCAB)
        count = torch.arange(5, dtype=torch.int32)
        apply_no_repeat_ngram(logits, slots, torch.tensor(ids), start, count, **state)
        assert [(row == -torch.inf).nonzero().flatten().tolist() for row in logits] == gone


def test_rows_are_independent() -> None:
    (logits, slots, *spec), state, _ = make_inputs(9)
    whole = logits.clone()
    apply_no_repeat_ngram(whole, slots, *spec, **state)
    for row in range(len(slots)):
        alone = logits[row : row + 1].clone()
        apply_no_repeat_ngram(alone, slots[row, None], spec[0], spec[1][row, None], spec[2][row, None], **state)
        assert torch.equal(alone[0], whole[row])


def test_wrong_arguments_are_named() -> None:
    (logits, slots, *spec), state, _ = make_inputs(0)
    with pytest.raises(ValueError, match="ngram_size"):
        apply_no_repeat_ngram(logits, slots, *spec, **(state | {"ngram_size": state["ngram_size"].long()}))
