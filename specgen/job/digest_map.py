"""A table from digests to integers that stays small: what a job must remember of every row it has seen.

Knows bytes of memory; does not know what a digest was made from.
"""

import hashlib
from array import array

_FIRST_SLOTS = 64


def digest_of(text: str) -> bytes:
    """Return the 8-byte digest of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


class DigestMap:
    """Maps 8-byte digests to integers from 0 to 2^64 - 1, in 24 to 48 bytes an entry (a dict needs about 110).

    Two digests are taken for one with odds of n^2 / 2^65 among n entries: 3e-6 for ten million.
    """

    def __init__(self) -> None:
        self._num_entries = 0
        # Open addressing, at most two thirds full; key 0 marks a free slot.
        self._keys = array("Q", bytes(8 * _FIRST_SLOTS))
        self._values = array("Q", bytes(8 * _FIRST_SLOTS))

    def __len__(self) -> int:
        """Return how many digests have a value."""
        return self._num_entries

    def __contains__(self, digest: bytes) -> bool:
        """Whether the digest has a value."""
        return bool(self._keys[self._slot_of(int.from_bytes(digest, "little") or 1)])

    def get(self, digest: bytes) -> int | None:
        """Return the value of `digest`, None if it has none."""
        slot = self._slot_of(int.from_bytes(digest, "little") or 1)
        return self._values[slot] if self._keys[slot] else None

    def setdefault(self, digest: bytes, value: int) -> int:
        """Return the value of `digest`, which is `value` from now on if it had none."""
        key = int.from_bytes(digest, "little") or 1
        slot = self._slot_of(key)
        if not self._keys[slot]:
            self._insert(slot, key, value)
            return value
        return self._values[slot]

    def count(self, digest: bytes) -> int:
        """Return how many times this was called with `digest` before."""
        key = int.from_bytes(digest, "little") or 1
        slot = self._slot_of(key)
        if not self._keys[slot]:
            self._insert(slot, key, 1)
            return 0
        self._values[slot] += 1
        return self._values[slot] - 1

    def _slot_of(self, key: int) -> int:
        keys = self._keys
        mask = len(keys) - 1
        slot = key & mask
        while keys[slot] and keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _insert(self, slot: int, key: int, value: int) -> None:
        self._keys[slot] = key
        self._values[slot] = value
        self._num_entries += 1
        if 3 * self._num_entries > 2 * len(self._keys):
            self._grow()

    def _grow(self) -> None:
        old_keys, old_values = self._keys, self._values
        self._keys = array("Q", bytes(16 * len(old_keys)))
        self._values = array("Q", bytes(16 * len(old_keys)))
        for key, value in zip(old_keys, old_values, strict=True):
            if key:
                slot = self._slot_of(key)
                self._keys[slot] = key
                self._values[slot] = value
