"""Divides logits by their row's temperature. Knows nothing of noise or filters.

In plain torch: the twin. On the device it is part of the pass in `sample_tokens.py`.
"""

import torch

from specgen.kernels._checks import check, check_same_device


def apply_temperature(logits: torch.Tensor, row_slots: torch.Tensor, temperature: torch.Tensor) -> None:
    """Each row of `logits [N, V] float32` is divided by its slot's temperature, in place.

    `row_slots [N] int32` (-1 = padded), `temperature [R] float32`. Padded rows and rows at temperature 0 (greedy)
    stay as they are. Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    check("row_slots", row_slots, torch.int32, logits.shape[0])
    check("temperature", temperature, torch.float32, None)
    check_same_device(logits=logits, row_slots=row_slots, temperature=temperature)
    divisor = temperature[row_slots.long().clamp(min=0)]
    divisor = torch.where((row_slots >= 0) & (divisor > 0), divisor, 1.0)  # x / 1 is x, bit by bit
    if bool((divisor != 1).any()):
        logits.div_(divisor[:, None])
