"""A thread that reads ahead of whoever needs the items, a bounded number, so that a slow pipe holds nobody up.

Knows threads; does not know what the items are.
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

# Items that are read ahead: enough to hide a slow pipe, few enough to keep memory flat.
_READ_AHEAD = 256
_WAIT_SECONDS = 0.2
Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Hands out the items of an iterable that is consumed in a thread of its own.

    `get` waits at most so long; `exhausted` is true once the last item was handed out.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.exhausted = False
        self._source = items
        self._items: deque[Item] = deque()
        self._failure: Exception | None = None
        self._ended = False  # set after the last append
        self._there_is_one = threading.Event()
        self._there_is_room = threading.Event()
        self._closed = False
        # A daemon: a read from a silent terminal cannot be called off, and must not keep the process alive.
        self._thread = threading.Thread(target=self._read, name="row-reader", daemon=True)
        self._thread.start()

    def peek(self) -> Item | None:
        """Wait for an item, or the end; return the item, which stays where it is, or None.

        Raises: whatever ended the reading before the first item.
        """
        while not self._items:
            if self._ended and not self._items:
                if self._failure is not None:
                    raise self._failure
                return None
            self._there_is_one.wait(_WAIT_SECONDS)
        return self._items[0]

    def get(self, timeout: float) -> Item | None:
        """Return the next item, None if none came within `timeout` seconds or there are no more.

        Raises: whatever ended the reading, in its place among the items.
        """
        item = self._take()
        if item is None and timeout > 0 and not self.exhausted:
            self._there_is_one.clear()
            item = self._take()  # one may have come before the clear
            if item is None and not self.exhausted:
                self._there_is_one.wait(timeout)
                item = self._take()
        return item

    def close(self) -> None:
        """Stop reading ahead; the thread ends by itself at its next item."""
        self._closed = True
        self._there_is_room.set()
        self._items.clear()

    def _take(self) -> Item | None:
        ended = self._ended  # read before looking: after it nothing is added
        if self._items:
            item = self._items.popleft()
            if len(self._items) < _READ_AHEAD // 2:
                self._there_is_room.set()
            return item
        if ended and not self.exhausted:
            self.exhausted = True
            if self._failure is not None:
                raise self._failure
        return None

    def _read(self) -> None:
        try:
            for item in self._source:
                while len(self._items) >= _READ_AHEAD and not self._closed:
                    self._there_is_room.clear()
                    if len(self._items) >= _READ_AHEAD:
                        self._there_is_room.wait(_WAIT_SECONDS)
                if self._closed:
                    return
                self._items.append(item)
                self._there_is_one.set()
        except Exception as error:
            self._failure = error
        finally:
            self._ended = True
            self._there_is_one.set()
