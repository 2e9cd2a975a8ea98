"""FP8 (e4m3) as hardware has it, under Triton's interpreter.

The interpreter of Triton 3.9 rounds a float32 to e4m3 without the carry into the exponent (127.5 becomes 64) and ties
away from even, and reads NaN as 480. Its conversion is replaced by torch's here; on a GPU nothing is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def correct_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions from and to e4m3 are torch's for the rest of the test."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source, target) or source not in dtypes or target not in dtypes:
            return plain(data, source, target, rounding_mode)
        flat = torch.from_numpy(np.array(data).reshape(-1).view(np.uint8)).view(dtypes[source])
        found = flat.to(dtypes[target]).view(torch.uint8).numpy()
        return found.view(f"u{dtypes[target].itemsize}").reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
