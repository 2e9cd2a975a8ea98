"""What this machine can do at the most: measured by a large copy and a large product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specgen.job.floor import Ceilings

# Far beyond any cache; and a product large enough that its edges do not count.
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 10


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the best of some large copies (read and written bytes) and products in `dtype` on `device`.

    Sets the libraries up, if nothing did before: call it after whatever decides how they compute.
    """
    ceilings = Ceilings(_copied_bytes_per_second(device), _product_flops_per_second(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _copied_bytes_per_second(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.numel() / _best_seconds(lambda: copy.copy_(source), device)


def _product_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    size = _PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * size**3 / _best_seconds(lambda: torch.matmul(a, b, out=product), device)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()
    if device.type != "cuda":
        return min(_wall_seconds(run) for _ in range(_REPEATS))
    seconds = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds)


def _wall_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
