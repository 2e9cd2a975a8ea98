"""Lines in order, appended whole; what a full disk leaves; and lines that wait."""

import os
import random
from pathlib import Path

import pytest

from specgen.errors import InputError
from specgen.job import writer as writer_module
from specgen.job.writer import FileSink, LineWriter, StreamSink


class Taken:
    """A sink that remembers the writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, lines: bytes) -> None:
        self.writes.append(lines)

    def close(self) -> None:
        self.writes.append(b"closed")


def test_lines_come_in_the_order_of_slots_or_as_given() -> None:
    order = list(range(50))
    random.Random(1).shuffle(order)
    for ordered in (True, False):
        sink = Taken()
        with LineWriter(sink, ordered=ordered) as writer:
            for slot in order:
                writer.put(slot, b"%d\n" % slot)
        assert sink.writes.pop() == b"closed"
        written = [int(line) for line in b"".join(sink.writes).split()]
        assert written == (sorted(order) if ordered else order)
        assert writer.num_written == 50


def test_held_lines_are_counted_and_written_at_the_end() -> None:
    sink = Taken()
    with LineWriter(sink, ordered=True) as writer:
        for slot in (4, 0, 2):
            writer.put(slot, b"%d\n" % slot)
        writer.flush()
        assert writer.num_held == 2
        assert sink.writes == [b"0\n"]
    assert sink.writes == [b"0\n", b"2\n4\n", b"closed"]


def test_lines_that_wait_are_in_a_file_until_they_are_written(tmp_path: Path) -> None:
    path, sink = tmp_path / "waiting", Taken()
    with LineWriter(sink, ordered=True, waiting_path=str(path)) as writer:
        writer.put(0, b"0\n")
        assert not path.exists()
        for slot in (3, 2):
            writer.put(slot, b"%d\n" % slot)
        writer.put(1, b"1\n")
        assert path.read_bytes() == b"3\n2\n"  # not written yet: a kill comes when it likes
        writer.flush()
        writer.put(5, b"5\n")
    assert b"".join(sink.writes) == b"0\n1\n2\n3\n5\nclosed"
    assert not path.exists()


def test_a_write_that_fails_leaves_the_file_of_what_waited(tmp_path: Path) -> None:
    class Full(Taken):
        def write(self, lines: bytes) -> None:
            if self.writes or b"2" not in lines:
                super().write(lines)
            else:
                self.writes.append(b"")
                raise InputError("full")

    def write() -> None:
        with LineWriter(Full(), ordered=True, waiting_path=str(path)) as writer:
            for slot in (4, 2, 1, 0):
                writer.put(slot, b"%d\n" % slot)
            writer.flush()

    path = tmp_path / "waiting"
    with pytest.raises(InputError, match="full"):
        write()
    assert path.read_bytes() == b"4\n2\n1\n"


def test_a_signal_in_the_middle_of_a_write_adds_nothing_to_half_a_line() -> None:
    class Interrupted(Taken):
        def write(self, lines: bytes) -> None:
            writer.write_held()  # as the handler of a second signal does
            super().write(lines)

    sink = Interrupted()
    writer = LineWriter(sink, ordered=True)
    writer.put(2, b"2\n")
    writer.put(0, b"0\n")
    writer.flush()
    assert sink.writes == [b"0\n"]
    writer.flush()
    assert sink.writes == [b"0\n", b"2\n"]


def test_a_file_is_appended_to_and_synced_by_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(writer_module.os, "fsync", synced.append)
    path = tmp_path / "out"
    path.write_bytes(b"old\n")
    sink = FileSink(str(path), fsync_rows=3)
    sink.write(b"1\n2\n")
    assert (path.read_bytes(), len(synced)) == (b"old\n1\n2\n", 0)
    sink.write(b"3\n")
    sink.write(b"4\n")
    assert len(synced) == 1
    sink.close()
    assert len(synced) == 2
    sink = FileSink(str(path), fsync_seconds=0.0)
    sink.write(b"5\n")
    sink.close()
    assert len(synced) == 3
    with pytest.raises(InputError, match="cannot be made: No such file"):
        FileSink(str(tmp_path / "missing" / "out"))


def test_lines_are_synced_when_it_is_time_though_no_more_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = 0.0, []
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(now))
    with LineWriter(FileSink(str(tmp_path / "out"), fsync_seconds=10), ordered=False) as writer:
        writer.put(0, b"a\n")
        for _ in range(30):
            writer.flush()
            now += 1
    assert synced == [10.0]


def test_a_write_that_fails_half_way_leaves_the_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    sink = FileSink(str(path))
    sink.write(b"first\n")
    real, calls = os.write, []

    def failing(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:9])

    monkeypatch.setattr(writer_module.os, "write", failing)
    with pytest.raises(InputError, match="No space left"):
        sink.write(b"second\nthird\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_devices_are_written_to_as_they_are() -> None:
    with LineWriter(StreamSink(os.devnull), ordered=True) as writer:
        writer.put(0, b"x\n")
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_device_is_the_users_to_mend() -> None:
    def write() -> None:
        with LineWriter(StreamSink("/dev/full"), ordered=True) as writer:
            writer.put(0, b"x\n")

    with pytest.raises(InputError, match="/dev/full: writing the output failed: No space left"):
        write()
