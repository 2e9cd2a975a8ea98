"""Without Triton the kernel files still import and their twins run."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from specgen.kernels._triton import HAS_TRITON
from specgen.kernels import draft_inputs, gumbel, penalties, post_update
from specgen.kernels import prepare_inputs, rejection, temperature, top_k_top_p
assert not HAS_TRITON
bounds = torch.tensor([0, 2], dtype=torch.int32)
ids = torch.tensor([4, 5])
assert rejection.rejection_sample(ids, torch.tensor([9, 4]), bounds, 1)[0].tolist() == [[4, 5]]
try:
    rejection.rejection_sample_triton(ids, ids, bounds, 1)
except RuntimeError as error:
    assert "_rejection_sample_kernel" in str(error)
else:
    raise AssertionError("the kernel ran")
"""


def test_kernels_import_without_triton() -> None:
    subprocess.run([sys.executable, "-P", "-c", PROGRAM], check=True)
