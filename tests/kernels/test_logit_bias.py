"""Logit bias: by hand, against transformers, kernel is twin bit by bit, the law."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from specgen.kernels.logit_bias import apply_logit_bias, apply_logit_bias_torch, apply_logit_bias_triton

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(num_rows: int, vocab: int, width: int) -> Call:
    """Slots with no, some and `width` entries; what lies behind a slot's entries is poison; a few rows padded."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    num_slots = num_rows // 2 + 2
    slots = torch.randint(0, num_slots, (num_rows,), generator=generator).int()
    slots[3::8] = -1
    slots[0] = 1
    count = torch.randint(0, width + 1, (num_slots,), generator=generator).int()
    count[::3], count[1] = 0, width
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(num_slots)]).int()
    values = torch.rand(num_slots, width, generator=generator) * 200 - 100
    behind = torch.arange(width) >= count[:, None]
    ids[4 % num_slots, 0] = vocab + 3  # no token
    ids[behind], values[behind] = 2**31 - 1, math.nan
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[::4, ::3] = -math.inf
    return logits, slots, ids, values, count


def test_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf]] * 3)
    ids, values = torch.tensor([[2, 0, 3], [1, 9, 9]]).int(), torch.tensor([[5.0, -0.5, 1.0], [-100.0, 7.0, 7.0]])
    apply_logit_bias(logits, torch.tensor([0, 1, -1]).int(), ids, values, torch.tensor([3, 1]).int())
    assert logits.tolist() == [[0.5, 2.0, -math.inf], [1.0, -98.0, -math.inf], [1.0, 2.0, -math.inf]]


def test_is_transformers() -> None:
    logits, slots, ids, values, count = make(24, 101, 9)
    wanted = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and count[slot]:
            n = int(count[slot])
            pairs = zip(ids[slot, :n].tolist(), values[slot, :n].tolist(), strict=True)
            bias = {(i,): v for i, v in pairs if i < 101}
            wanted[row : row + 1] = SequenceBiasLogitsProcessor(bias)(torch.zeros(1, 1).long(), wanted[row : row + 1])
    apply_logit_bias(logits, slots, ids, values, count)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize(("num_rows", "vocab", "width"), [(11, 2051, 259), (3, 5, 5), (2, 151_936, 1024)])
def test_kernel_is_the_twin(kernel_device: str, num_rows: int, vocab: int, width: int) -> None:
    call = make(num_rows, vocab, width)
    on_device = tuple(x.to(kernel_device, copy=True) for x in call)
    apply_logit_bias_triton(*on_device)
    apply_logit_bias_torch(*call)
    assert torch.equal(on_device[0].cpu(), call[0])


def test_kernel_with_far_rows(kernel_device: str, far_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call = make(3, 517, 20)
    call[1].fill_(1)
    far = far_rows(call[0])
    apply_logit_bias_triton(far, *(x.to(kernel_device) for x in call[1:]))
    apply_logit_bias_torch(*call)
    assert torch.equal(far.cpu(), call[0])


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    logits, slots, *tables = make(301, 523, 40)
    whole = logits.clone()
    apply_logit_bias(whole, slots, *tables)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_logit_bias(part, slots[rows], *tables)
        assert torch.equal(part, whole[rows])


def test_no_rows(kernel_device: str) -> None:
    call = make(4, 40, 3)
    for op, device in ((apply_logit_bias_torch, "cpu"), (apply_logit_bias_triton, kernel_device)):
        op(*(x[:0].to(device) for x in call[:2]), *(x.to(device) for x in call[2:]))


def test_wrong_arguments_are_refused() -> None:
    logits, slots, ids, values, count = make(4, 40, 3)
    for bad in (
        (logits, slots, ids.long(), values, count),
        (logits, slots, ids, values[:, :2], count),
        (logits, slots, ids, values, count[:-1]),
    ):
        with pytest.raises(ValueError):
            apply_logit_bias(*bad)
