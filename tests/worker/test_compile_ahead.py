"""Kernels compiled side by side before they are launched: by Triton's own compiler for a GPU that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

# What Triton asks a driver for before it compiles. A launch would ask for more, and fail.
PROGRAM = """
import os, threading, time
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class NoDevice:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(NoDevice())
import torch
from specgen.kernels import rms_norm as norm, silu_mul as act
from specgen.worker import compile_ahead as module
from specgen.worker.compile_ahead import compile_ahead
from specgen.worker.startup import compile_clock
from triton.runtime.jit import JITFunction

clock = compile_clock()
compiling, most = set(), 0
told = clock.before
names = []


def tell(*, src, **rest):
    names.append((src.name, threading.current_thread() is threading.main_thread()))
    told and told(src=src, **rest)


clock.before = tell
run, x, results = JITFunction.run, torch.ones(4, 64), []


def step():
    for rows in (x, x[:2]):  # the same kernels again
        results.append(act.silu_mul_triton(rows))
        results.append(norm.rms_norm_triton(rows, torch.ones(64), 1e-6))
        results.append(act.silu_mul_triton(rows.bfloat16()))


class Layer(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp


target = torch.nn.Module()
layers = [Layer(torch.nn.Identity()), Layer(torch.nn.Identity()), Layer(torch.nn.ReLU()), Layer(torch.nn.ReLU())]
target.layers = all_layers = torch.nn.ModuleList(layers)
seen = []
progress = []
compile_ahead(target, [step, lambda: seen.extend(target.layers), step], lambda *n: progress.append(n))
assert progress[0] == (0, 1) and progress[-1] == (3, 3), progress
assert set(seen) == {layers[0], layers[2]} and target.layers is all_layers
assert sorted(names) == [("_rms_norm_kernel", False)] + 2 * [("_silu_mul_kernel", False)], names
assert clock.num_compiled == 3
assert len(results) == 12 and not any(result.any() for result in results), "results are zeros"
assert JITFunction.run is run

# What was compiled is found where a launch looks for it.
device = act._silu_mul_kernel.device_caches[0]
assert len(device[0]) == 2, list(device[0])
act._silu_mul_kernel.warmup(x, x.stride(0), x, 32, BLOCK=1024, PDL=False, grid=(4, 1))
assert clock.num_compiled == 3

# A step that fails leaves nothing behind.
def fails():
    raise KeyError("step")


def is_as_before():
    no_mode = not torch.overrides._is_torch_function_mode_enabled()
    return JITFunction.run is run and target.layers is all_layers and no_mode


assert is_as_before()
try:
    compile_ahead(target, [fails])
except KeyError:
    assert is_as_before()
else:
    raise AssertionError("the step failed")


# A kernel that can't be compiled, met again and again, is for its launch to report.
@triton_jit
def broken(x_ptr, N: tl.constexpr):
    tl.static_assert(N == 1)


def launch():
    broken[(1,)](x, N=2)


def wait():
    time.sleep(0.3)


told = []
compile_ahead(target, [launch, wait, launch, wait, launch], lambda *n: told.append(n))
assert told[-1][0] == told[-1][1] and told == sorted(told), told
for _ in range(2):
    try:
        launch()
    except triton.TritonError as error:
        assert "static_assert" in str(error) or "Compilation" in type(error).__name__, error
    else:
        raise AssertionError("the kernel can't be compiled")

# A Triton that can't compile so is let alone.
module.TRITON_VERSION = (3, 5)
compile_ahead(target, [fails])
"""


def test_kernels_are_compiled_in_threads_and_nothing_is_launched(tmp_path: Path) -> None:
    # In a file, since a kernel's source is read from it.
    program = tmp_path / "program.py"
    program.write_text("from triton import jit as triton_jit, language as tl\n" + PROGRAM)
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-P", str(program)], check=True, env=environment)
