"""Cache writes: each row in its slot, a slot of -1 nowhere (canaries), kernel against twin, far slots."""

import pytest
import torch

from specgen.kernels.kv_write import write_latent_kv, write_latent_kv_torch, write_latent_kv_triton

CANARY = -77.0


@pytest.mark.parametrize("slots", [[3, -1, 9, 0, 15, -1, 2], [-1] * 7, [0, 1, 2, 3, 4, 5, 15], []])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_rows_land_in_their_slots_and_nowhere_else(kernel_device: str, slots: list[int], use_kernel: bool) -> None:
    torch.manual_seed(0)
    device = kernel_device if use_kernel else "cpu"
    rows = torch.randn(len(slots), 31, device=device)
    # The cache lies inside a larger buffer, so that a write just before or after it shows.
    buffer = torch.full((6, 4, 25), CANARY, device=device)
    write = write_latent_kv_triton if use_kernel else write_latent_kv_torch
    write(rows[:, :20], rows[:, 26:], torch.tensor(slots, dtype=torch.int64, device=device), buffer[1:5])
    want = torch.full((24, 25), CANARY)
    for row, slot in zip(rows.cpu(), slots, strict=True):
        if slot >= 0:
            want[4 + slot] = torch.cat([row[:20], row[26:]])
    assert torch.equal(buffer.cpu().view(24, 25), want)


def test_a_slot_past_2_31_elements(kernel_device: str) -> None:
    try:  # hardly any of it becomes real memory on the CPU
        cache = torch.empty(2**27 // 16 + 2, 16, 16, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")
    row, slot = torch.randn(1, 16, device=kernel_device), torch.tensor([2**27 + 17], device=kernel_device)
    write_latent_kv_triton(row[:, :12], row[:, 12:], slot, cache)
    assert torch.equal(cache.view(-1, 16)[2**27 + 17], row[0])


def test_wrong_arguments_are_refused() -> None:
    rows, slots = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="kv_cache: expected shape"):
        write_latent_kv(rows, rows, slots, torch.zeros(3, 4, 9))
    with pytest.raises(ValueError, match="slot_mapping: expected dtype"):
        write_latent_kv(rows, rows, slots.int(), torch.zeros(3, 4, 8))
    with pytest.raises(ValueError, match="contiguous"):
        write_latent_kv(rows, rows, slots, torch.zeros(4, 3, 8).transpose(0, 1))
