"""Imports `triton` and `triton.language as tl`, or harmless stand-ins where Triton is not installed.

With the stand-ins the kernel files still import, so that the twins run; launching a kernel raises RuntimeError.
"""

# mypy: ignore-errors

import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

# Products and sums are fused to one rounding, as they were when forms of a kernel were compared bit by bit; from Triton
# 3.10 on it would not be the default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
except ImportError:
    HAS_TRITON, TRITON_VERSION = False, (0, 0)

    class _Kernel:
        """A kernel that was declared but can't be launched."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError(f"Triton is not installed, so {self.name} can't run; use the torch twin")

    class _TritonStandIn:
        """The few names of `triton` that a kernel file needs at import time or to size a grid."""

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            """Return an unlaunchable kernel in place of `fn`."""
            return _Kernel(fn.__name__) if fn is not None else lambda f: _Kernel(f.__name__)

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            """Return a / b rounded up."""
            return -(-a // b)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            """Return the smallest power of two that is at least `n`."""
            return 1 << max(n - 1, 0).bit_length()

    class _LanguageStandIn:
        """The names of `triton.language` that appear in kernel signatures and module constants."""

        class constexpr:
            """Holds a compile-time constant."""

            def __init__(self, value: Any = None) -> None:
                self.value = value

    triton = _TritonStandIn()
    tl = _LanguageStandIn()


logger = logging.getLogger(__name__)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernels before this one, then let the next one be set up while this one runs.

    Every program of a kernel that is launched with `pdl()` begins with it, or with `start_next_and_wait`: what is read
    or written after it is in launch order. What stands before it writes nothing, and reads weights or what is older
    than the last kernel before this one that lets the next begin in here (or was launched without `pdl()`).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next_and_wait(PDL: tl.constexpr):
    """As `wait_for_inputs`, but the next kernel is set up, and asks for its weights, while this one still waits.

    For short kernels, whose own work leaves the memory idle: 3 % of a step of one row. Attention and products of few
    rows gain nothing by it. Not for kernels on whose lateness a reader before its own wait relies, see
    tests/kernels/test_launch_order.py.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(pointers):
    """Ask the second-level cache for the lines that `pointers` lie in; nothing waits for them. CUDA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def pdl() -> dict[str, bool]:
    """Return the launch options for programmatic dependent launch: on from Hopper on, off elsewhere.

    Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
    """
    import torch

    on = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


@functools.cache
def is_hopper() -> bool:
    """Whether there may be kernels in Gluon for Hopper: compute capability 9.0, and a Triton that has Gluon."""
    import torch

    return hopper is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


not_compiled: set[str] = set()


def launched(name: str, launch: Callable[[], object]) -> bool:
    """Launch a kernel in Gluon, whose language changes from one Triton to the next; False if this one can't compile it.

    Another form of the kernel, with the same bits, is then to be launched. `name` is for the log, once.
    """
    if name in not_compiled:
        return False
    try:
        launch()
    except (triton.TritonError, RuntimeError) as error:  # of the language, of ptxas, for want of resources
        if isinstance(error, RuntimeError) and "PassManager" not in str(error):
            raise  # of the device, not of the compiler
        not_compiled.add(name)
        reason = " ".join(str(error).split())[:200]
        logger.warning(
            "%s: Triton %s can't compile the form for Hopper, a slower one runs: %s", name, triton.__version__, reason
        )
        return False
    return True


def can_use_tma(*tensors: Any) -> bool:
    """Whether blocks of each tensor's last two dimensions can be copied by the tensor memory accelerator."""
    fits = all(t.is_contiguous() and t.shape[-1] * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)
    return fits and (not tensors[0].is_cuda or "launch_pdl" in pdl())  # the interpreter has no hardware to ask


def descriptor(tensor: Any, block: list[int]) -> Any:
    """Return what a kernel loads blocks of a contiguous 2-D tensor by."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block)


def hopper_descriptor(tensor: Any, block: list[int]) -> Any:
    """Return what kernels in Gluon load [rows, columns] blocks of a 2-D tensor by, as products on Hopper read them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout(128, 8 * tensor.itemsize))


def tile_height(heights: Iterable[int], num_rows: float) -> int:
    """Return the lowest of some rising heights of tiles that holds so many rows, or the highest."""
    rising = list(heights)
    return next((height for height in rising if height >= num_rows), rising[-1])


@functools.cache
def num_processors() -> int:
    """Return the number of the current GPU's multiprocessors."""
    import torch

    return torch.cuda.get_device_properties().multi_processor_count


try:
    if TRITON_VERSION < (3, 6):
        raise ImportError("layouts and warp groups are written otherwise in older ones")
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    # By their names until Triton 3.6 and 3.8, and since.
    thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    load_block = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
except (ImportError, AttributeError):  # a Triton without it, or none
    gluon, gl, hopper, thread_barrier, load_block = triton, tl, None, None, None


@gluon.jit
def next_stage_of(stage, phase, STAGES: gl.constexpr):
    """Return the (stage, phase of its barrier) that a ring's next block comes to."""
    next_stage = stage + 1
    next_phase = phase
    if next_stage == STAGES:
        next_stage = 0
        next_phase = phase ^ 1
    return next_stage, next_phase


__all__ = [
    "HAS_TRITON",
    "TRITON_VERSION",
    "ask_for",
    "can_use_tma",
    "descriptor",
    "gl",
    "gluon",
    "hopper",
    "hopper_descriptor",
    "is_hopper",
    "launched",
    "load_block",
    "next_stage_of",
    "not_compiled",
    "num_processors",
    "pdl",
    "start_next_and_wait",
    "thread_barrier",
    "tile_height",
    "tl",
    "triton",
    "wait_for_inputs",
]
