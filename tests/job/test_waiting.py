"""Lines that wait: in memory and in a file, which is never much larger than what waits, and has it all."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from specgen.errors import InputError
from specgen.job import waiting as waiting_module
from specgen.job.waiting import Waiting


def line_of(slot: int) -> bytes:
    return b"%d " % slot * (3 + slot % 5) + b"\n"


@pytest.mark.parametrize("is_named", [True, False])
def test_lines_that_wait_leave_memory_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.setattr(waiting_module, "_MEMORY_BYTES", 1000)
    monkeypatch.setattr(waiting_module, "_PACK_BYTES", 5000)
    path = tmp_path / "waiting"
    waiting = Waiting(str(path) if is_named else None)
    rng = random.Random(1)
    there: set[int] = set()
    sizes = []
    for slot in range(3000):
        waiting.put(slot, line_of(slot))
        there.add(slot)
        for gone in rng.sample(sorted(there), k=len(there) - rng.randrange(80, 120) if len(there) > 120 else 0):
            assert waiting.pop(gone) == line_of(gone)
            there.remove(gone)
        waiting.pack()
        assert waiting.slots() == sorted(there)
        assert len(waiting) == len(there)
        in_memory = sum(len(held) for held in waiting._lines.values() if isinstance(held, bytes))
        assert in_memory == waiting._num_in_memory <= 1000
        assert waiting._num_bytes == sum(len(line_of(slot)) for slot in there)
        sizes.append(waiting._end)
        if is_named and slot % 50 == 0:
            assert {line_of(slot) for slot in there} <= set(path.read_bytes().splitlines(keepends=True))
    assert max(sizes) < 2 * 5000 + 3000
    assert any(later < before for before, later in pairwise(sizes))
    for slot in sorted(there):
        assert waiting.pop(slot) == line_of(slot)
    assert waiting.pop(0) is None
    waiting.close(forget=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_forgotten_stays_and_one_that_nobody_needs_is_never_made(tmp_path: Path) -> None:
    path = tmp_path / "waiting"
    waiting = Waiting(str(path))
    waiting.close(forget=True)
    waiting.put(4, b"4\n")
    waiting.close(forget=False)
    assert path.read_bytes() == b"4\n"


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(str(tmp_path / "missing" / "waiting"))
    with pytest.raises(InputError, match=r"missing/waiting: lines that wait .* cannot be put aside: No such file"):
        waiting.put(1, b"1\n")

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    waiting = Waiting(str(tmp_path / "waiting"))
    waiting.put(1, b"1\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="cannot be put aside: No space left"):
            waiting.put(2, b"2\n")
    waiting.put(2, b"two\n")
    assert (waiting.slots(), waiting.pop(1), waiting.pop(2)) == ([1, 2], b"1\n", b"two\n")
