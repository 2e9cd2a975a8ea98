"""Gumbel sampling: the noise against a scalar oracle, the choice against whole-row noise, the distribution, the law."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from specgen.kernels import _draw
from specgen.kernels._draw import _gumbel_of
from specgen.kernels._triton import tl, triton
from specgen.kernels.gumbel import gumbel_noise, gumbel_sample, gumbel_sample_torch, gumbel_sample_triton

# Worst case: float32 rounding of u near g = -3 and of g near 22 (half an ulp is 1e-6), and a logarithm's last bits.
NOISE_TOLERANCE = 4e-6

Subsets = Callable[[int], Iterator[torch.Tensor]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86-32 of 32-bit words, seed 0."""
    mask, h = 0xFFFFFFFF, 0
    for k in words:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def noise_of(seed: int, position: int, token: int) -> float:
    mask = 0xFFFFFFFF
    u = (murmur3([seed & mask, seed >> 32 & mask, position & mask, token]) + 0.5) / 2**32
    return -math.log(-math.log1p(-u))


def make_inputs(num_rows: int, vocab: int, scale: float = 3.0) -> Inputs:
    """Logits, row_slots (shuffled, a few padded), positions, seeds, temperature (a third of the slots greedy)."""
    generator = torch.Generator().manual_seed(num_rows * 100003 + vocab)
    row_slots = torch.randperm(num_rows, generator=generator).int()
    row_slots[5::11] = -1
    temperature = torch.rand(num_rows, generator=generator) + 0.1
    temperature[::3] = 0
    return (
        torch.randn(num_rows, vocab, generator=generator) * scale,
        row_slots,
        torch.randint(0, 2**34, (num_rows,), generator=generator),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        temperature,
    )


def expected(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """The definition, with the noise of whole rows."""
    scores = torch.where(logits.isnan(), -torch.inf, logits)
    at = slots.long().clamp(min=0)
    scores = torch.where(
        temperature[at, None] > 0, scores + gumbel_noise(seeds[at], positions, logits.shape[1]), scores
    )
    first = (scores == scores.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return torch.where((slots >= 0) & (scores.amax(dim=1) > -torch.inf), first, 0)


def test_murmur3_known_value() -> None:
    # The published vector of this hash for the bytes ff ff ff ff at seed 0.
    assert murmur3([0xFFFFFFFF]) == 0x76293B50


def test_noise_is_the_scalar_formula() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions = torch.tensor([0, 7, 2**31, 2**32 + 7, 5, 8191])
    noise = gumbel_noise(seeds, positions, 37)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for token in range(37):
            assert noise[row, token].item() == pytest.approx(noise_of(seed, position, token), rel=1e-6, abs=1e-7)


def test_noise_depends_on_the_low_word_of_the_position_only() -> None:
    seeds = torch.tensor([5, 5])
    noise = gumbel_noise(seeds, torch.tensor([7, 2**32 + 7]), 100)
    assert torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0, 1e4])
def test_screened_choice_is_the_choice_by_whole_rows(scale: float) -> None:
    inputs = make_inputs(97, 1531, scale)
    assert torch.equal(gumbel_sample(*inputs), expected(*inputs))


def test_few_finite_logits() -> None:
    logits, *rest = make_inputs(64, 1531)
    logits[:, 7:1500] = -torch.inf
    logits[3] = -torch.inf
    inputs = (logits, *rest)
    assert torch.equal(gumbel_sample(*inputs), expected(*inputs))


def test_odd_values(kernel_device: str) -> None:
    logits = torch.zeros(6, 8)
    logits[0, 3] = torch.nan  # NaN never wins; the greedy tie goes to id 0
    logits[1] = -torch.inf
    logits[2, 5:7] = torch.inf  # infinities beat all noise and tie
    logits[3] = torch.nan
    logits[4, :] = torch.tensor([0, 2, 1, 2, 2, 0, 0, 0])
    slots = torch.tensor([0, 1, 1, 1, 0, -1], dtype=torch.int32)
    seeds, temperature = torch.tensor([1, 2]), torch.tensor([0.0, 1.0])
    inputs = (logits, slots, torch.arange(6), seeds, temperature)
    assert gumbel_sample_torch(*inputs).tolist() == [0, 0, 5, 0, 1, 0]
    assert gumbel_sample_triton(*(x.to(kernel_device) for x in inputs)).tolist() == [0, 0, 5, 0, 1, 0]


def test_distribution_is_softmax() -> None:
    # Chi-square with 19 degrees of freedom; a sound sampler passes 66 with probability 4e-7. Seeds vary, then
    # positions.
    draws, vocab = 20_000, 20
    logits = torch.linspace(0, 3, vocab)
    share = torch.softmax(logits.double(), 0)
    count, zero = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    slots, ones = count.int(), torch.ones(draws)
    for seeds, positions in ((count, zero), (zero + 99, count)):
        sampled = gumbel_sample(logits.expand(draws, -1), slots, positions, seeds, ones)
        seen = torch.bincount(sampled, minlength=vocab).double()
        assert float(((seen - draws * share) ** 2 / (draws * share)).sum()) < 66


def test_a_row_alone_is_the_row_in_company(threads: int, row_subsets: Subsets) -> None:
    logits, slots, positions, seeds, temperature = make_inputs(301, 523, 1.0)
    logits *= torch.tensor([0.5, 6.0, 30.0])[torch.arange(301) % 3, None]
    whole = gumbel_sample(logits, slots, positions, seeds, temperature)
    for rows in row_subsets(301):
        part = gumbel_sample(logits[rows], slots[rows], positions[rows], seeds, temperature)
        assert torch.equal(part, whole[rows])


@triton.jit
def _noise_kernel(out_ptr, seeds_ptr, positions_ptr, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    noise = _gumbel_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), token)
    tl.store(out_ptr + row * vocab_size + token, noise, mask=token < vocab_size)


def test_kernel_noise_agrees(kernel_device: str) -> None:
    _, _, positions, seeds, _ = make_inputs(40, 8191)
    noise = torch.full((40, 8191), torch.nan, device=kernel_device)
    _noise_kernel[(40,)](noise, seeds.to(kernel_device), positions.to(kernel_device), 8191, BLOCK=8192)
    torch.testing.assert_close(noise.cpu(), gumbel_noise(seeds, positions, 8191), rtol=0, atol=NOISE_TOLERANCE)


# Many rows share a GPU by few programs, each of which goes through several blocks of a row: as if there were many.
@pytest.mark.parametrize(
    ("num_rows", "vocab", "scale", "programs"),
    [
        (13, 1531, 3.0, 8192),
        (3, 5, 1.0, 8192),
        (1, 1024, 0.0, 8192),
        (13, 1531, 3.0, 1),
        (7, 9001, 1.0, 1),
        (1, 151_936, 2.0, 1),
    ],
)
def test_kernel_picks_what_the_twin_picks(
    kernel_device: str, num_rows: int, vocab: int, scale: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_draw, "_PROGRAMS", programs)
    inputs = make_inputs(num_rows, vocab, scale)
    inputs[0][:, vocab // 2 : vocab // 2 + 2] = torch.tensor([torch.nan, -torch.inf])
    got = gumbel_sample_triton(*(x.to(kernel_device) for x in inputs)).cpu()
    assert torch.equal(got, gumbel_sample_torch(*inputs))


@pytest.mark.gpu
def test_a_row_alone_is_the_row_in_company_for_the_kernel(kernel_device: str) -> None:
    num_rows, vocab = (1100, 20_011) if kernel_device == "cuda" else (5, 1531)
    inputs = make_inputs(num_rows, vocab)
    logits, slots, positions, seeds, temperature = (x.to(kernel_device) for x in inputs)
    whole = gumbel_sample_triton(logits, slots, positions, seeds, temperature)
    for rows in (slice(None), slice(0, 1), slice(2, 5), slice(1, num_rows - 1), slice(num_rows // 2, None)):
        part = gumbel_sample_triton(
            logits[rows].clone(), slots[rows].clone(), positions[rows].clone(), seeds, temperature
        )
        assert torch.equal(part, whole[rows])


def test_kernel_with_far_rows(kernel_device: str, far_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits, slots, positions, seeds, temperature = make_inputs(3, 517)
    rest = (x.to(kernel_device) for x in (slots, positions, seeds, temperature))
    got = gumbel_sample_triton(far_rows(logits), *rest).cpu()
    assert torch.equal(got, gumbel_sample_torch(logits, slots, positions, seeds, temperature))


def test_no_rows() -> None:
    inputs = make_inputs(1, 8)
    none = tuple(x[:0] for x in inputs[:3])
    assert gumbel_sample(*none, *inputs[3:]).shape == (0,)
    assert gumbel_sample_triton(*none, *inputs[3:]).shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    logits, slots, positions, seeds, temperature = make_inputs(4, 8)
    with pytest.raises(ValueError, match="logits: expected dtype"):
        gumbel_sample(logits.double(), slots, positions, seeds, temperature)
    with pytest.raises(ValueError, match="row_slots: expected shape"):
        gumbel_sample(logits, slots[:3], positions, seeds, temperature)
    with pytest.raises(ValueError, match="contiguous"):
        gumbel_sample(logits.T.contiguous().T, slots, positions, seeds, temperature)
