"""Which logits rows hold a NaN: what a broken model, or a broken KV entry, leaves behind. Knows nothing else.

In plain torch: the twin. On the device it is part of the pass in `sample_tokens.py`.
"""

import torch

from specgen.kernels._checks import check


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return `[N] bool`: whether each row of `logits [N, V] float32` holds a NaN.

    Raises: ValueError on a wrong dtype, shape or layout.
    """
    check("logits", logits, torch.float32, None, None)
    return logits.amax(dim=1).isnan()
