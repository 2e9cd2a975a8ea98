"""Reading ahead: bounded, in order, and no obstacle to ending."""

import threading
import time
from collections.abc import Iterator

import pytest

from specgen.errors import InputError
from specgen.job.read_ahead import ReadAhead


def drained(source: ReadAhead[int]) -> list[int]:
    items = []
    while not source.exhausted:
        item = source.get(timeout=1.0)
        if item is not None:
            items.append(item)
    return items


def test_nothing_is_lost_and_it_ends() -> None:
    source = ReadAhead(range(10_000, 20_000))
    assert source.peek() == 10_000
    assert drained(source) == list(range(10_000, 20_000))
    assert source.get(timeout=0.0) is None


def test_an_empty_source_is_noticed() -> None:
    source: ReadAhead[int] = ReadAhead([])
    assert source.peek() is None
    assert drained(source) == []


def test_it_is_bounded_and_can_be_called_off() -> None:
    read = []

    def endless() -> Iterator[int]:
        while True:
            read.append(0)
            yield len(read)

    source = ReadAhead(endless())
    source.peek()
    threading.Event().wait(0.05)
    assert len(read) < 300
    source.close()
    source._thread.join(timeout=5.0)
    assert not source._thread.is_alive()


def test_an_item_is_handed_on_as_soon_as_it_is_there() -> None:
    more = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        more.wait(10)
        yield 2

    source = ReadAhead(slow())
    assert source.get(timeout=5.0) == 1
    started = time.monotonic()
    assert source.get(timeout=0.05) is None
    assert time.monotonic() - started < 1.0
    more.set()
    assert source.get(timeout=5.0) == 2


def test_a_failure_comes_in_its_place() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise InputError("Input/output error")

    source = ReadAhead(broken())
    assert source.peek() == 1
    assert source.get(timeout=1.0) == 1
    with pytest.raises(InputError, match="Input/output error"):
        drained(source)
    assert source.exhausted
