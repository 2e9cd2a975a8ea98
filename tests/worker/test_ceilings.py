"""The ceilings are a machine's, not a typo's."""

import pytest
import torch

from specgen.worker import ceilings
from specgen.worker.ceilings import measure_ceilings


def test_ceilings_are_of_this_worlds_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings._COPY_BYTES, "cpu", 32 << 20)
    monkeypatch.setitem(ceilings._PRODUCT_SIZE, "cpu", 256)
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < found.bytes_per_second < 1e13
    assert 1e8 < found.flops_per_second < 1e15
