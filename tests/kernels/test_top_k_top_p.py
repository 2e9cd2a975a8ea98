"""Top-k and top-p: against transformers' warpers, ties and odd values by hand, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels.top_k_top_p import apply_top_k_top_p

INF = torch.inf


def filtered(logits: torch.Tensor, k: int, p: float) -> torch.Tensor:
    out, rows = logits.clone(), logits.shape[0]
    limits = torch.full((rows,), k, dtype=torch.int32), torch.full((rows,), p)
    apply_top_k_top_p(out, torch.arange(rows, dtype=torch.int32), *limits)
    return out


def log(*probabilities: float) -> list[float]:
    return torch.tensor(probabilities).log().tolist()


CASES = [
    # logits, k, p, kept ids
    ([1.0, 3.0, 2.0], 1, 1.0, [1]),
    ([1.0, 3.0, 2.0], 2, 1.0, [1, 2]),
    ([1.0, 3.0, 2.0], 7, 1.0, [0, 1, 2]),  # k >= V is off
    ([1.0, 3.0, 1.0, 1.0], 2, 1.0, [0, 1, 2, 3]),  # ties at the k-th stay together
    ([0.0, -0.0, -1.0, 0.0], 1, 1.0, [0, 1, 3]),  # 0 and -0 tie
    (log(0.5, 0.3, 0.2), 0, 0.4, [0]),
    (log(0.5, 0.3, 0.2), 0, 0.6, [0, 1]),
    (log(0.5, 0.3, 0.2), 0, 0.9, [0, 1, 2]),
    (log(0.5, 0.3, 0.2), 0, 0.0, [0]),  # the largest always stays
    (log(0.4, 0.2, 0.2, 0.2), 0, 0.5, [0, 1, 2, 3]),  # ties stay together
    (log(0.4, 0.2, 0.2, 0.2), 0, 0.39, [0]),
    (log(0.4, 0.3, 0.2, 0.1), 2, 0.5, [0]),  # 0.4 / 0.7 > 0.5: renormalised after top-k
    (log(0.4, 0.3, 0.2, 0.1), 2, 0.6, [0, 1]),
    ([INF, 5.0, INF, 1.0], 1, 0.5, [0, 2]),
    ([-INF, -INF, -INF], 1, 0.5, []),
    ([float("nan"), 5.0, 1.0], 1, 1.0, [1]),
    ([100.0, -200.0, -300.0], 2, 0.9999, [0]),
    ([100.0, -200.0, -300.0], 2, 1.0, [0, 1]),
]


@pytest.mark.parametrize(("logits", "k", "p", "ids"), CASES)
def test_by_hand(logits: list[float], k: int, p: float, ids: list[int]) -> None:
    assert (filtered(torch.tensor([logits]), k, p)[0] > -INF).nonzero().flatten().tolist() == ids


def test_values_that_stay_keep_their_bits_and_rows_that_are_off_are_untouched() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    logits[1, 3] = torch.nan
    out = logits.clone()
    slots = torch.tensor([0, 1, -1, 2, 3], dtype=torch.int32)
    apply_top_k_top_p(out, slots, torch.tensor([5, 0, 300, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 1.0, 0.9]))
    for row in (1, 2, 3):
        assert torch.equal(out[row].nan_to_num(9), logits[row].nan_to_num(9))
    for row, stay in ((0, 5), (4, None)):
        alive = out[row] > -INF
        assert torch.equal(out[row][alive], logits[row][alive])
        assert stay is None or int(alive.sum()) == stay


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(
    ("k", "p"), [(1, 1.0), (50, 1.0), (700, 1.0), (0, 0.1), (0, 0.95), (0, 0.999), (50, 0.9), (700, 0.8)]
)
def test_equals_transformers(scale: float, k: int, p: float) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(int(scale * 10))
    logits = torch.randn(40, 1531) * scale
    theirs = logits.double()  # their float32 cumulative sum is off by 1e-6, which shows at p = 0.999
    ids = torch.zeros(40, 1, dtype=torch.int64)
    theirs = TopKLogitsWarper(k)(ids, theirs) if k else theirs
    theirs = TopPLogitsWarper(p)(ids, theirs) if p < 1 else theirs
    assert torch.equal(filtered(logits, k, p) > -INF, theirs > -INF)


def mixed_inputs(
    num_rows: int, vocab: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every combination of limits, some off, some padded; logits of odd rows in steps of 1/8 (many ties)."""
    generator = torch.Generator().manual_seed(num_rows + vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * scale
    logits[1::2] = (logits[1::2] * 8).round() / 8
    slots = torch.randperm(num_rows, generator=generator).int()
    slots[4::9] = -1
    top_k = torch.tensor([0, 3, 40, vocab // 2])[torch.randint(0, 4, (num_rows,), generator=generator)].int()
    top_p = torch.tensor([1.0, 0.95, 0.3, 0.999])[torch.randint(0, 4, (num_rows,), generator=generator)]
    return logits, slots, top_k, top_p


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]) -> None:
    logits, slots, *limits = mixed_inputs(301, 523, 1.0)
    logits *= torch.tensor([0.5, 5.0, 1.0])[torch.arange(301) % 3, None]
    whole = logits.clone()
    apply_top_k_top_p(whole, slots, *limits)
    for rows in row_subsets(301):
        part = logits[rows]
        apply_top_k_top_p(part, slots[rows], *limits)
        assert torch.equal(part, whole[rows])


def test_wrong_arguments_are_refused() -> None:
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="top_k: expected dtype"):
        apply_top_k_top_p(torch.zeros(1, 2), slots, torch.ones(1), torch.ones(1))
