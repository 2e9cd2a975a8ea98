"""Set up before any test module is imported: the import path, and Triton's interpreter where there is no GPU."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# `kernels` and `cli` are importable as specgen.kernels and specgen.cli only: `python -m pytest` puts the checkout on
# the path, where a top-level `kernels` would shadow the package of that name that transformers looks for.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared

# Tiny tensors on two threads mostly wait for each other; what must hold for two takes the fixture `threads`.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where kernels are tested: "cuda", or "cpu" under Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with one and with two of torch's threads: the law holds for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def row_subsets() -> Callable[[int], Iterator[torch.Tensor]]:
    """Rows to call an op on alone: every size from 1 to 70 and some hundreds, drawn anew, in ascending order."""

    def draw(num_rows: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for size in [*range(1, 71), 96, 127, 200, 255, 300]:
            if size <= num_rows:
                yield torch.randperm(num_rows, generator=generator)[:size].sort().values

    return draw


@pytest.fixture
def far_rows(kernel_device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy a matrix into one whose last row lies past 2^31 elements, where an int32 address wraps."""

    def spread(matrix: torch.Tensor) -> torch.Tensor:
        stride = -(-(2**31) // (matrix.shape[0] - 1))
        try:  # never written between the rows, so on the CPU hardly any of it becomes real memory
            flat = torch.empty(2**31 + stride, dtype=matrix.dtype, device=kernel_device)
        except RuntimeError as error:
            pytest.skip(f"no address space for a tensor of 2^31 elements: {error}")
        far = flat.as_strided(matrix.shape, (stride, 1))
        far.copy_(matrix)
        return far

    return spread
