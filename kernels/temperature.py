"""Divides logits by their row's temperature. Knows nothing of noise or filters."""

import torch

from specgen.kernels._checks import check, check_same_device
from specgen.kernels._triton import tl, triton

_BLOCK = 4096


def apply_temperature(logits: torch.Tensor, row_slots: torch.Tensor, temperature: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` is divided by its slot's temperature, in place.

    `row_slots [N] int32` (-1 = padded), `temperature [R] float32`. Padded rows and rows at temperature 0 (greedy)
    stay as they are. Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("temperature", temperature, torch.float32, None)
    check_same_device(logits=logits, row_slots=row_slots, temperature=temperature)
    op = apply_temperature_triton if logits.is_cuda else apply_temperature_torch
    op(logits, row_slots, temperature)


def apply_temperature_torch(logits: torch.Tensor, row_slots: torch.Tensor, temperature: torch.Tensor) -> None:
    """Do what `apply_temperature` does, by torch operations."""
    divisor = temperature[row_slots.long().clamp(min=0)]
    divisor = torch.where((row_slots >= 0) & (divisor > 0), divisor, 1.0)  # x / 1 is x, bit by bit
    if bool((divisor != 1).any()):
        logits.div_(divisor[:, None])


@triton.jit
def _temperature_kernel(logits_ptr, logits_stride, row_slots_ptr, temperature_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    if (temperature <= 0.0) | (temperature == 1.0):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    at = logits_ptr + row * logits_stride + ids
    logits = tl.load(at, mask=mask, other=0.0)
    tl.store(at, tl.div_rn(logits, temperature), mask=mask)


def apply_temperature_triton(logits: torch.Tensor, row_slots: torch.Tensor, temperature: torch.Tensor) -> None:
    """Do what `apply_temperature` does, by a (rows x vocabulary blocks) grid."""
    num_rows, vocab = logits.shape
    if logits.numel():
        _temperature_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits, logits.stride(0), row_slots, temperature, vocab, BLOCK=_BLOCK
        )
