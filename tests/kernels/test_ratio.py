"""Ratio verification: the rule row by row against a scalar oracle, the kernel against its twin, the law, the odds."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy.stats import chi2

from specgen.kernels.gumbel import gumbel_noise, gumbel_sample_torch
from specgen.kernels.ratio import DRAFT_STREAM, ratio_sample, ratio_sample_torch, ratio_sample_triton
from specgen.kernels.synthetic_rejection import uniforms

Subsets = Callable[[int], Iterator[torch.Tensor]]
K = 3


def make_inputs(num_reqs: int, vocab: int, seed: int = 0) -> list[torch.Tensor]:
    """`num_reqs` requests of 1 to K + 1 rows; filtered and greedy rows, placeholders and padded requests among them."""
    g = torch.Generator().manual_seed(seed)
    widths = torch.randint(1, K + 2, (num_reqs,), generator=g)
    slots = torch.randperm(num_reqs, generator=g).int()
    slots[3::7] = -1
    row_slots = slots.repeat_interleave(widths)
    num_rows = len(row_slots)
    spec_count = torch.cat([torch.arange(int(w), dtype=torch.int32) for w in widths])
    logits = torch.randn(num_rows, vocab, generator=g) * 2
    draft_logits = torch.randn(num_reqs, K, vocab, generator=g) * 2
    logits[::3][torch.rand(logits[::3].shape, generator=g) < 0.5] = -torch.inf
    draft_logits[::4][torch.rand(draft_logits[::4].shape, generator=g) < 0.5] = -torch.inf
    logits[:, 3] = torch.nan
    positions = torch.randint(0, 2**20, (num_rows,), generator=g)
    seeds = torch.randint(0, 2**62, (num_reqs,), generator=g)
    temperature = torch.ones(num_reqs)
    temperature[::5] = 0
    draft_ids = torch.randint(0, vocab, (num_rows,), generator=g)
    live = row_slots.long().clamp(min=0)
    for n in range(1, num_rows):  # half of the drafts are likely ones
        if spec_count[n] and n % 2:
            draft_ids[n] = draft_logits[live[n], spec_count[n] - 1].argmax()
    draft_ids[4::13] = -1
    sampled = gumbel_sample_torch(logits, row_slots, positions, seeds, temperature)
    return [logits, sampled, draft_ids, draft_logits, row_slots, spec_count, positions, seeds, temperature]


def expected(args: list[torch.Tensor]) -> list[int]:
    """Algorithm 1 with the noise written out, in float64."""
    logits, sampled, draft_ids, draft_logits, row_slots, spec_count, positions, seeds, temperature = args
    out = sampled.tolist()
    for n in range(len(out) - 1):
        slot, draft = int(row_slots[n]), int(draft_ids[n + 1])
        if slot < 0 or int(row_slots[n + 1]) != slot or draft < 0 or temperature[slot] == 0:
            continue
        p = logits[n].double().nan_to_num(nan=-torch.inf, neginf=-torch.inf).softmax(0)
        q = draft_logits[slot, spec_count[n]].double().softmax(0)
        u = float(uniforms(seeds[slot, None], positions[n, None]))
        if u * float(q[draft]) < float(p[draft]):
            out[n] = draft
        else:
            noise = gumbel_noise(seeds[slot, None], positions[n, None], logits.shape[1])[0]
            out[n] = int(((p - q).clamp(min=0).log() + noise).argmax())
    return out


@pytest.mark.parametrize("vocab", [17, 300])
def test_the_rule(vocab: int) -> None:
    args = make_inputs(60, vocab)
    got = ratio_sample(*args).tolist()
    assert got == expected(args)
    kept = [a == int(b) for a, b in zip(got[:-1], args[2][1:], strict=True)]
    assert 10 < sum(kept) < len(kept) - 10


@pytest.mark.parametrize(("num_reqs", "vocab"), [(30, 1000), (7, 4099)])
def test_kernel_equals_twin(kernel_device: str, num_reqs: int, vocab: int) -> None:
    args = make_inputs(num_reqs, vocab, seed=1)
    got = ratio_sample_triton(*[a.to(kernel_device) for a in args]).cpu()
    assert torch.equal(got, ratio_sample_torch(*args))


def test_a_row_does_not_depend_on_its_company() -> None:
    args = make_inputs(40, 500, seed=2)
    whole = ratio_sample_torch(*args)
    for first in range(0, len(whole) - 5, 3):
        part = slice(first, first + 5)
        alone = [a[part] for a in (args[0], args[1], args[2])] + [args[3]] + [a[part] for a in args[4:7]] + args[7:]
        # the last row of the part has lost the row that says which draft it judges
        assert torch.equal(ratio_sample_torch(*alone)[:4], whole[part][:4])


def test_nothing_left_of_p_keeps_the_targets_token(kernel_device: str) -> None:
    args = make_inputs(1, 4)
    logits = torch.full((2, 4), -torch.inf)
    args[0], args[1], args[2] = logits, torch.tensor([0, 0]), torch.tensor([1, 2])
    args[3], args[4], args[5] = torch.zeros(1, K, 4), torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1]).int()
    args[6], args[8] = torch.tensor([3, 4]), torch.ones(1)
    for op, device in ((ratio_sample_torch, "cpu"), (ratio_sample_triton, kernel_device)):
        assert op(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["good", "bad", "disjoint"])
def test_what_is_emitted_follows_p(kind: str) -> None:
    """8,000 rows with other seeds; a true law is rejected with odds of 1e-6."""
    num, vocab, g = 8_000, 12, torch.Generator().manual_seed(3)
    p = torch.randn(vocab, generator=g)
    q = {"good": p + 0.3 * torch.randn(vocab, generator=g), "bad": -p, "disjoint": torch.full((vocab,), -torch.inf)}[
        kind
    ]
    if kind == "disjoint":
        q[3], p[3] = 0.0, -torch.inf
    seeds = torch.arange(1, num + 1)
    slots, positions = torch.arange(num, dtype=torch.int32), torch.full((num,), 9)
    drafts = gumbel_sample_torch(q.expand(num, -1), slots, positions, seeds ^ DRAFT_STREAM, torch.ones(num))
    logits = p.expand(num, -1).repeat_interleave(2, dim=0).contiguous()
    row_slots = slots.repeat_interleave(2)
    two = positions.repeat_interleave(2)
    sampled = gumbel_sample_torch(logits, row_slots, two, seeds, torch.ones(num))
    ids = torch.stack([torch.zeros_like(drafts), drafts], dim=1).flatten()
    local = torch.tensor([0, 1]).int().repeat(num)
    out = ratio_sample_torch(logits, sampled, ids, q.expand(num, 1, -1), row_slots, local, two, seeds, torch.ones(num))[
        ::2
    ]
    want = p.softmax(0).double() * num
    counts = torch.bincount(out, minlength=vocab).double()
    assert bool((counts[want == 0] == 0).all())
    some = want > 0
    statistic = float(((counts - want)[some] ** 2 / want[some]).sum())
    assert statistic < chi2.isf(1e-6, int(some.sum()) - 1)
    accepted = float((out == drafts).double().mean())
    overlap = float(torch.minimum(p.softmax(0), q.softmax(0)).sum())
    assert math.isclose(accepted, overlap, abs_tol=0.03)
