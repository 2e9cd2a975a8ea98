"""Synthetic acceptance: rates, placeholders, row independence, and kernel = twin."""

import pytest
import torch

from specgen.kernels.synthetic_rejection import (
    conditional_rates,
    synthetic_rejection_sample,
    synthetic_rejection_sample_torch,
    synthetic_rejection_sample_triton,
    uniforms,
)

RATES = (0.85, 0.70, 0.55)


def batch(counts: list[int], num_slots: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    total = sum(counts)
    slots = torch.randperm(num_slots, generator=g)[: len(counts)].int()
    starts = torch.randint(5, 1000, (len(counts),), generator=g)
    lengths = torch.tensor(counts)
    return {
        "target_sampled": torch.randint(0, 100, (total,), generator=g),
        "draft_ids": torch.randint(0, 100, (total,), generator=g),
        "cu_num_logits": torch.tensor([0, *torch.cumsum(lengths, 0).tolist()], dtype=torch.int32),
        "row_slots": slots.repeat_interleave(lengths),
        "positions": torch.cat([s + torch.arange(n) for s, n in zip(starts, counts, strict=True)]),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=g),
        "rates": torch.tensor(conditional_rates(RATES)),
    }


def test_rates_are_of_whole_prefixes() -> None:
    assert conditional_rates(RATES) == pytest.approx([0.85, 0.7 / 0.85, 0.55 / 0.7])
    assert conditional_rates((0.5, 0.0, 0.0)) == [0.5, 0.0, 0.0]


def test_prefixes_are_accepted_at_their_rates() -> None:
    """20,000 rows: each share is within 5 standard deviations (0.018) of its rate, odds of a false alarm 2e-6."""
    num = 20_000
    b = batch([4] * num, num)
    sampled, num_sampled = synthetic_rejection_sample(**b)
    for i, rate in enumerate(RATES):
        assert float((num_sampled > i + 1).float().mean()) == pytest.approx(rate, abs=5 * 0.5 / num**0.5)
    target = b["target_sampled"].view(num, 4)
    kept = torch.arange(4) < num_sampled[:, None]
    assert torch.equal(sampled, torch.where(kept, target, -1)), "what is emitted is the target's"


def test_placeholders_and_padded_rows_are_refused_and_rates_of_one_accept_all() -> None:
    b = batch([4, 4, 2, 0, 1], 8)
    b["rates"] = torch.ones(3)
    b["draft_ids"][2] = -1  # the second draft of the first request
    b["row_slots"][4:8] = -1
    sampled, num_sampled = synthetic_rejection_sample(**b)
    assert num_sampled.tolist() == [2, 1, 2, 0, 1]
    assert (sampled[3] == -1).all()


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    b = batch([4] * 30, 40)
    together = synthetic_rejection_sample(**b)
    for i in (0, 7, 29):
        rows = slice(4 * i, 4 * i + 4)
        alone = synthetic_rejection_sample(
            b["target_sampled"][rows],
            b["draft_ids"][rows],
            torch.tensor([0, 4], dtype=torch.int32),
            b["row_slots"][rows],
            b["positions"][rows],
            b["seeds"],
            b["rates"],
        )
        assert torch.equal(alone[0][0], together[0][i])
    u = uniforms(torch.arange(50_000), torch.full((50_000,), 9))
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_kernel_is_the_twin(kernel_device: str, width: int) -> None:
    counts = [width + 1, 1, 0, min(2, width + 1), *[width + 1] * 13]
    b = batch(counts, 23)
    b["rates"] = torch.tensor(conditional_rates(RATES[:width]))
    if width:
        b["draft_ids"][1] = -1
    b["row_slots"][-1] = -1
    want = synthetic_rejection_sample_torch(**b)
    got = synthetic_rejection_sample_triton(**{name: value.to(kernel_device) for name, value in b.items()})
    assert torch.equal(got[0].cpu(), want[0])
    assert torch.equal(got[1].cpu(), want[1])


def test_wrong_arguments_are_refused() -> None:
    b = batch([2, 2], 4)
    with pytest.raises(ValueError, match="row_slots"):
        synthetic_rejection_sample(**{**b, "row_slots": b["row_slots"].long()})
    with pytest.raises(ValueError, match="rates"):
        synthetic_rejection_sample(**{**b, "rates": b["rates"].double()})
