"""Without Triton the kernels still import and their twins run; a form that it can't compile gives way to another."""

import ast
import subprocess
import sys
from collections.abc import Callable

import pytest

from specgen.kernels import _triton as module

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from specgen.kernels._triton import HAS_TRITON
from specgen.kernels import draft_inputs, draft_layer_inputs, gqa_attention, gumbel, mla_attention, moe_experts
from specgen.kernels import penalties, post_update, sample_tokens
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


triton = pytest.importorskip("triton")


OLD = """
import triton
triton.__version__ = "3.5.1"
from specgen.kernels import _triton, mla_attention, moe_experts
assert _triton.hopper is None
assert not _triton.is_hopper()
"""


def test_an_older_triton_has_no_kernels_in_gluon() -> None:
    subprocess.run([sys.executable, "-P", "-c", OLD], check=True)


def not_compiled() -> None:
    raise triton.CompilationError("x = 1", ast.parse("x = 1").body[0], "a name is gone")


def out_of_memory() -> None:
    raise triton.OutOfResources(300_000, 232_448, "shared memory")


def pass_failed() -> None:
    raise RuntimeError("PassManager::run failed")


@pytest.mark.parametrize("launch", [not_compiled, out_of_memory, pass_failed])
def test_what_is_not_compiled_is_not_tried_again(
    launch: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "not_compiled", set())
    tried = []

    def counted() -> None:
        tried.append(launch)
        launch()

    assert not module.launched("a kernel", counted)
    assert not module.launched("a kernel", counted)
    assert len(tried) == 1
    assert module.launched("another", lambda: tried.append(launch))
    (record,) = caplog.records
    assert "a kernel" in record.getMessage() and triton.__version__ in record.getMessage()


def test_an_error_of_the_device_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "not_compiled", set())

    def launch() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        module.launched("a kernel", launch)
