"""The tiny model, and one torch thread: at its sizes a second one only waits for the first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))
