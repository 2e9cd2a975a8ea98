"""Bad words: by hand, against transformers at draft and bonus rows, kernel is twin, the law."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from specgen.kernels.bad_words import apply_bad_words, apply_bad_words_torch, apply_bad_words_triton

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
State = dict[str, torch.Tensor]
Words = list[list[list[int]]]
NUM_IDS = 4  # so few tokens in texts and words that most words match somewhere


def tables(words: Words, max_ids: int, max_words: int) -> State:
    """The words of each slot; what lies behind them is poison."""
    ids = torch.full((len(words), max_ids), 2**31 - 1, dtype=torch.int32)
    ends = torch.full((len(words), max_words), 2**31 - 1, dtype=torch.int32)
    for slot, of_slot in enumerate(words):
        flat = [token for word in of_slot for token in word]
        ids[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        lengths = torch.tensor([len(word) for word in of_slot], dtype=torch.int32)
        ends[slot, : len(of_slot)] = lengths.cumsum(0).int()
    count = torch.tensor([len(of_slot) for of_slot in words], dtype=torch.int32)
    return {"bad_word_ids": ids, "bad_word_ends": ends, "num_bad_words": count}


def make(num_rows: int, vocab: int, max_words: int = 9) -> tuple[Call, State, Words]:
    """Texts of 1 token up, words of 1 to 5 tokens, 0 to 4 drafts, some of them placeholders; a few rows padded."""
    g = torch.Generator().manual_seed(num_rows * 7919 + vocab)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    num_slots = num_rows // 2 + 2
    slots = draw(0, num_slots, num_rows).int()
    slots[3::8] = -1
    spec_ids = torch.where(draw(0, 8, 4 * num_rows + 1) == 0, -1, draw(0, NUM_IDS, 4 * num_rows + 1))
    spec_count, spec_start = draw(0, 5, num_rows).int(), draw(0, 4 * num_rows - 3, num_rows).int()
    total_len = draw(1, 13, num_slots).int()
    token_ids = draw(0, NUM_IDS, num_slots, 12).int()
    token_ids[torch.arange(12) >= total_len[:, None]] = 2  # stale tokens behind the row's own
    words = [
        [
            draw(0, NUM_IDS, int(draw(1, 6))).tolist()[:-1] + draw(0, vocab, 1).tolist()
            for _ in range(int(draw(1, max_words + 1)))
        ]
        if slot % 3
        else []
        for slot in range(num_slots)
    ]
    words[1].insert(0, [vocab + 3])  # no token
    state = {"token_ids": token_ids, "total_len": total_len} | tables(words, 5 * max_words + 1, max_words + 1)
    logits = torch.randn(num_rows, vocab, generator=g)
    logits[::4, ::3] = -math.inf
    return (logits, slots, spec_ids, spec_start, spec_count), state, words


def test_by_hand() -> None:
    """The word 1 2 3 at the committed end, across the border, within the drafts; not after a placeholder."""
    state = {
        "token_ids": torch.tensor([[5, 1, 2, 9], [5, 1, 9, 9], [5, 9, 9, 9], [2, 9, 9, 9]]).int(),
        "total_len": torch.tensor([3, 2, 1, 1]).int(),
    } | tables([[[4], [1, 2, 3]]] * 3 + [[[1, 2, 3], [2, 0]]], 5, 2)
    spec_ids = torch.tensor([7, 2, 1, 2, -1])
    rows = [  # slot, first draft, number of drafts, removed
        (0, 0, 0, [3, 4]),
        (0, 0, 1, [4]),
        (1, 1, 0, [4]),
        (1, 1, 1, [3, 4]),
        (2, 2, 1, [4]),
        (2, 2, 2, [3, 4]),
        (2, 3, 2, [4]),
        (3, 0, 0, [0]),  # 1 2 3 is longer than the text
        (-1, 2, 2, []),
    ]
    slots, start, count = (torch.tensor(column).int() for column in list(zip(*rows, strict=True))[:3])
    logits = torch.zeros(len(rows), 6)
    apply_bad_words(logits, slots, spec_ids, start, count, **state)
    assert [(row == -math.inf).nonzero().flatten().tolist() for row in logits] == [removed for *_, removed in rows]


def test_is_transformers() -> None:
    (logits, slots, spec_ids, start, count), state, words = make(60, 7)
    before, wanted, num_multi = logits.clone(), logits.clone(), 0
    for row, slot in enumerate(slots.tolist()):
        if slot < 0 or not words[slot]:
            continue
        text = state["token_ids"][slot, : int(state["total_len"][slot])].tolist()
        text += spec_ids[start[row] : start[row] + count[row]].tolist()
        row_logits = before[row : row + 1]
        known = [word for word in words[slot] if word[-1] < 7]
        wanted[row] = NoBadWordsLogitsProcessor(known)(torch.tensor([text]), row_logits)[0]
        single = {word[0] for word in words[slot] if len(word) == 1}
        num_multi += any(wanted[row, v] < before[row, v] for v in range(7) if v not in single)
    apply_bad_words(logits, slots, spec_ids, start, count, **state)
    assert torch.equal(logits, wanted)
    assert num_multi > 5


@pytest.mark.parametrize(("num_rows", "vocab", "words"), [(19, 2051, 150), (5, 5, 1), (2, 151_936, 1024)])
def test_kernel_is_the_twin(kernel_device: str, num_rows: int, vocab: int, words: int) -> None:
    call, state, _ = make(num_rows, vocab, words)
    on_device = tuple(x.to(kernel_device, copy=True) for x in call)
    apply_bad_words_triton(*on_device, **{name: x.to(kernel_device) for name, x in state.items()})
    apply_bad_words_torch(*call, **state)
    assert torch.equal(on_device[0].cpu(), call[0])


def test_kernel_with_far_rows(kernel_device: str, far_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call, state, _ = make(3, 17)
    call[1].copy_(torch.tensor([1, 2, 2]))
    on_device = {name: x.to(kernel_device) for name, x in state.items()}
    far, on_device["token_ids"] = far_rows(call[0]), far_rows(state["token_ids"])
    apply_bad_words_triton(far, *(x.to(kernel_device) for x in call[1:]), **on_device)
    apply_bad_words_torch(*call, **state)
    assert torch.equal(far.cpu(), call[0])


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    (logits, slots, spec_ids, start, count), state, _ = make(301, 23)
    whole = logits.clone()
    apply_bad_words(whole, slots, spec_ids, start, count, **state)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_bad_words(part, slots[rows], spec_ids, start[rows], count[rows], **state)
        assert torch.equal(part, whole[rows])


def test_no_rows_and_no_drafts(kernel_device: str) -> None:
    (logits, slots, _, start, _), state, _ = make(4, 40)
    call = (logits, slots, torch.zeros(0, dtype=torch.int64), start * 0, start * 0)
    results = []
    for op, device in ((apply_bad_words_torch, "cpu"), (apply_bad_words_triton, kernel_device)):
        moved, on_device = [x.to(device, copy=True) for x in call], {name: x.to(device) for name, x in state.items()}
        op(*moved, **on_device)
        results.append(moved[0].cpu())
        op(*(x[:0] for x in moved), **on_device)
    assert torch.equal(*results)


def test_wrong_arguments_are_refused() -> None:
    call, state, _ = make(4, 40)
    for name in state:
        with pytest.raises(ValueError, match=name):
            apply_bad_words(*call, **state | {name: state[name].long()})
    with pytest.raises(ValueError, match="spec_count"):
        apply_bad_words(*call[:4], call[4][:2], **state)
