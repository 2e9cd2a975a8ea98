"""What latent attention reads: each token in its slot, a slot of -1 nowhere (canaries), the queries' rotary part."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specgen.kernels.mla_inputs import mla_inputs, mla_inputs_torch, mla_inputs_triton
from specgen.kernels.rms_norm import rms_norm_torch
from specgen.kernels.rope import apply_rope
from specgen.models.rope_table import rope_table

CANARY = -77.0
RANK, ROPE, HEADS = 20, 6, 3
TABLE, _ = rope_table(ROPE, 100, 10_000.0, None)


def _inputs(num_tokens: int, device: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Latents and queries as slices of wider rows, as the model has them."""
    torch.manual_seed(num_tokens)
    latent = torch.randn(num_tokens, 40).to(dtype)[:, 8 : 8 + RANK + ROPE]
    q_pe = torch.randn(num_tokens, HEADS, 16).to(dtype)[..., 10:]
    positions = torch.randint(0, 120, (num_tokens,))  # some beyond the table
    return [t.to(device) for t in (latent, q_pe, torch.randn(RANK).to(dtype), positions, TABLE)]


def _run(op: Callable[..., None], inputs: list[Any], slots: list[int], interleaved: bool) -> tuple[Any, Any]:
    """Return the cache (inside a larger buffer of canaries) and q after the op."""
    latent, q_pe, weight, positions, table = inputs
    buffer = torch.full((6, 4, RANK + ROPE), CANARY, dtype=latent.dtype, device=latent.device)
    q = torch.full((len(slots), HEADS, RANK + ROPE), CANARY, dtype=latent.dtype, device=latent.device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=latent.device)
    op(latent, q_pe, weight, 1e-6, positions, table, interleaved, slot_mapping, buffer[1:5], q)
    return buffer.view(24, -1), q


@pytest.mark.parametrize("slots", [[3, -1, 9, 0, 15, -1, 2], [-1] * 7, []])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_tokens_land_in_their_slots_and_nowhere_else(
    kernel_device: str, slots: list[int], interleaved: bool, use_kernel: bool
) -> None:
    op, device = (mla_inputs_triton, kernel_device) if use_kernel else (mla_inputs_torch, "cpu")
    inputs = _inputs(len(slots), device)
    cache, q = (t.cpu() for t in _run(op, inputs, slots, interleaved))
    latent, q_pe, weight, positions, table = (t.cpu() for t in inputs)
    normed = rms_norm_torch(latent[:, :RANK], weight, 1e-6)
    q_pe, k_pe = apply_rope(q_pe, latent[:, RANK:], positions, table, interleaved)
    want = torch.full((24, RANK + ROPE), CANARY)
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[4 + slot] = torch.cat([normed[t], k_pe[t]])
    torch.testing.assert_close(cache, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache == CANARY, want == CANARY)
    torch.testing.assert_close(q[..., RANK:], q_pe, rtol=1e-5, atol=1e-6)
    assert (q[..., :RANK] == CANARY).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_the_cache_alone_and_then_some_queries_are_parts_of_the_whole(
    kernel_device: str, interleaved: bool, use_kernel: bool
) -> None:
    """Without heads only the cache is written; with slots of -1 the queries alone."""
    op, device = (mla_inputs_triton, kernel_device) if use_kernel else (mla_inputs_torch, "cpu")
    latent, q_pe, weight, positions, table = inputs = _inputs(7, device)
    slots = [3, -1, 9, 0, 15, -1, 2]
    whole_cache, whole_q = _run(op, inputs, slots, interleaved)
    buffer = torch.full((6, 4, RANK + ROPE), CANARY, device=device)
    no_heads = latent.new_empty(7, 0, RANK + ROPE)
    slot_mapping = torch.tensor(slots, device=device)
    op(
        latent, no_heads[..., RANK:], weight, 1e-6, positions, table, interleaved, slot_mapping, buffer[1:5], no_heads
    )  # fmt: skip
    assert torch.equal(buffer.view(24, -1), whole_cache)
    rows = torch.tensor([5, 0, 2], device=device)
    some = [latent[rows], q_pe[rows], weight, positions[rows], table]
    cache, q = _run(op, some, [-1] * 3, interleaved)
    assert (cache == CANARY).all() and torch.equal(q, whole_q[rows])


def test_a_token_alone_is_the_token_in_company(
    threads: int, row_subsets: Callable[[int], Iterator[torch.Tensor]]
) -> None:
    latent, q_pe, weight, positions, table = _inputs(16, "cpu")
    whole = _run(mla_inputs, [latent, q_pe, weight, positions, table], list(range(16)), True)
    for rows in row_subsets(16):
        inputs = [latent[rows], q_pe[rows], weight, positions[rows], table]
        cache, q = _run(mla_inputs, inputs, rows.tolist(), True)
        assert torch.equal(cache[4 + rows], whole[0][4 + rows]) and torch.equal(q, whole[1][rows])


def test_a_slot_past_2_31_elements(kernel_device: str) -> None:
    width = RANK + ROPE
    try:  # hardly any of it becomes real memory on the CPU
        cache = torch.empty(2**31 // (16 * width) + 2, 16, width, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")
    inputs = _inputs(1, kernel_device)
    slot = cache.shape[0] * 16 - 1
    slots = torch.tensor([slot], device=kernel_device)
    q = torch.empty(1, HEADS, width, device=kernel_device)
    mla_inputs_triton(inputs[0], inputs[1], inputs[2], 1e-6, inputs[3], inputs[4], True, slots, cache, q)
    want = _run(mla_inputs_torch, [t.cpu() for t in inputs], [3], True)[0][7]
    torch.testing.assert_close(cache.view(-1, width)[slot].cpu(), want, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    latent, q_pe, weight, positions, table = _inputs(3, "cpu")
    slots, cache, q = torch.zeros(3).long(), torch.zeros(2, 4, RANK + ROPE), torch.zeros(3, HEADS, RANK + ROPE)
    good = [latent, q_pe, weight, 1e-6, positions, table, True, slots, cache, q]
    for i, wrong, message in [
        (0, latent[:, 1:], "latent: expected shape"),
        (7, slots.int(), "slot_mapping: expected dtype"),
        (8, cache.transpose(0, 1), "contiguous"),
        (5, table[:0], "rope needs"),
    ]:
        with pytest.raises(ValueError, match=message):
            mla_inputs(*good[:i], wrong, *good[i + 1 :])
