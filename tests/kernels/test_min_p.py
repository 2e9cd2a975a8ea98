"""Min-p: by hand, against transformers, the law."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper

from specgen.kernels.min_p import apply_min_p

INF = math.inf


def make(num_rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A third of the slots off, a few rows padded, one row each with NaN, +inf and nothing but -inf."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + vocab)
    num_slots = num_rows // 2 + 2
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[::3, ::4] = -INF
    slots = torch.randint(0, num_slots, (num_rows,), generator=generator).int()
    slots[3::8] = -1
    reach = torch.rand(num_slots, generator=generator) * 6
    reach[::3] = INF
    reach[1] = 0.0
    if num_rows > 5:
        slots[:3], slots[5] = 2, 1
        logits[0, 1], logits[1, 2], logits[2] = math.nan, INF, -INF
    return logits, slots, reach


def test_by_hand() -> None:
    row = [0.0, -0.5, -1.0, -INF, math.nan]
    logits = torch.tensor([row] * 5)
    reach = torch.tensor([-math.log(0.5), -math.log(0.61), 0.0, INF])
    apply_min_p(logits, torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32), reach)
    assert logits[:3].tolist() == [
        [0.0, -0.5, -INF, -INF, -INF],  # e^-0.5 = 0.607, e^-1 = 0.368
        [0.0, -INF, -INF, -INF, -INF],
        [0.0, -INF, -INF, -INF, -INF],
    ]
    assert torch.equal(logits[3:].nan_to_num(nan=9), torch.tensor([row] * 2).nan_to_num(nan=9))  # off, padded


def test_infinite_rows() -> None:
    logits = torch.tensor([[INF, 3.0, INF], [-INF] * 3, [math.nan] * 3])
    apply_min_p(logits, torch.zeros(3, dtype=torch.int32), torch.tensor([1.0]))
    assert logits.tolist() == [[INF, -INF, INF], [-INF] * 3, [-INF] * 3]


@pytest.mark.parametrize("min_p", [1e-8, 0.02, 0.3, 0.9, 1.0])
def test_is_transformers(min_p: float) -> None:
    logits = torch.randn(40, 301, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, ::5] = -INF
    wanted = MinPLogitsWarper(min_p)(torch.zeros(40, 1, dtype=torch.int64), logits.clone())
    apply_min_p(logits, torch.zeros(40, dtype=torch.int32), torch.tensor([-math.log(min_p)]))
    assert torch.equal(logits, wanted)


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    logits, slots, reach = make(301, 523)
    whole = logits.clone()
    apply_min_p(whole, slots, reach)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_min_p(part, slots[rows], reach)
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=0, equal_nan=True)


def test_no_rows() -> None:
    apply_min_p(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int32), torch.ones(2))


def test_wrong_arguments_are_refused() -> None:
    logits, slots, reach = make(4, 40)
    for bad in ((logits.double(), slots, reach), (logits, slots[:3], reach), (logits, slots, reach[:, None])):
        with pytest.raises(ValueError):
            apply_min_p(*bad)
