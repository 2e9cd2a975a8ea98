"""Log-probabilities: torch's log_softmax in float64, order and ties, what is not a number, the kernel, the law."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels.logprobs import MAX_TOP, Logprobs, gather_logprobs, gather_logprobs_torch, gather_logprobs_triton

Subsets = Callable[[int], Iterator[torch.Tensor]]
# float32 sums of a few thousand terms, and logarithms of the two libraries.
TOLERANCE = 2e-6


def make_inputs(num_rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (rounded, so that there are equals; some removed), slots (a few padded), tokens, how many are wanted."""
    g = torch.Generator().manual_seed(num_rows + vocab)
    logits = (torch.randn(num_rows, vocab, generator=g) * 6).round() / 2
    logits[::3][torch.rand(logits[::3].shape, generator=g) < 0.8] = -torch.inf
    logits[:, vocab // 2] = 1.0
    slots = torch.randperm(num_rows, generator=g).int()
    slots[4::7] = -1
    num_top = torch.randint(-1, MAX_TOP + 1, (num_rows,), generator=g).int()
    return logits, slots, logits.argmax(1), num_top


def run(op: Callable[..., None], args: tuple[torch.Tensor, ...], device: str = "cpu") -> Logprobs:
    out = Logprobs(*[t.fill_(-77) for t in Logprobs.empty(len(args[0]), torch.device(device))])
    op(*[a.to(device) for a in args], out)
    return Logprobs(*[t.cpu() for t in out])


@pytest.mark.parametrize(("num_rows", "vocab"), [(60, 13), (30, 1000), (12, 5003)])
def test_log_softmax_and_order(kernel_device: str, num_rows: int, vocab: int) -> None:
    args = logits, slots, tokens, num_top = make_inputs(num_rows, vocab)
    for op in (gather_logprobs_torch, gather_logprobs_triton):
        got = run(op, args, kernel_device if op is gather_logprobs_triton else "cpu")
        for row, slot in enumerate(slots.tolist()):
            wanted = int(num_top[slot]) if slot >= 0 else -1
            if wanted < 0:
                assert bool((got.token[row] == -77) & (got.top[row] == -77).all())
                continue
            truth = logits[row].double().log_softmax(0)
            assert float(got.token[row]) == pytest.approx(float(truth[tokens[row]]), abs=TOLERANCE)
            order = torch.sort(truth, descending=True, stable=True).indices
            ids = [int(i) for i in order[:wanted] if truth[i] > -torch.inf]
            assert got.top_ids[row].tolist() == ids + [-1] * (wanted - len(ids)) + [-77] * (MAX_TOP - wanted)
            torch.testing.assert_close(got.top[row, : len(ids)].double(), truth[ids], rtol=0, atol=TOLERANCE)
            assert bool((got.top[row, len(ids) : wanted] == -torch.inf).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_numbers_says_so(kernel_device: str, value: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = value
    args = (logits, torch.tensor([0, 0]).int(), torch.tensor([1, 1]), torch.tensor([2]).int())
    for op, device in ((gather_logprobs_torch, "cpu"), (gather_logprobs_triton, kernel_device)):
        got = run(op, args, device)
        assert bool(got.token[0].isfinite())
        assert bool(got.token[1].isnan()) and bool(got.top[1, :2].isnan().all())
        assert got.top_ids[1, :2].tolist() == [-1, -1]


def test_rows_are_independent(row_subsets: Subsets, threads: int) -> None:
    logits, slots, tokens, num_top = make_inputs(130, 700)
    whole = run(gather_logprobs, (logits, slots, tokens, num_top))
    for rows in row_subsets(130):
        part = run(gather_logprobs, (logits[rows], slots[rows], tokens[rows], num_top))
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
