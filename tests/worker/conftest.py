"""The tiny model for the worker's tests."""

from pathlib import Path

import pytest
from tiny import write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))
