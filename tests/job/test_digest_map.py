"""The small table against a dict, with keys that collide, and its size."""

import random
import tracemalloc

from specgen.job.digest_map import DigestMap


def test_it_does_what_a_dict_does() -> None:
    rng = random.Random(0)
    first, counts = DigestMap(), DigestMap()
    want_first: dict[bytes, int] = {}
    want_counts: dict[bytes, int] = {}
    # Digests alike in their low bits fall on the same slots; 0 and 1 share the key that stands for them.
    keys = [(i << 40 | i % 7 + 2).to_bytes(8, "little") for i in range(300)] + [b"\xff" * 8, bytes(8)]
    for line in range(3_000):
        key = rng.choice(keys)
        assert first.setdefault(key, line) == want_first.setdefault(key, line)
        assert counts.count(key) == want_counts.get(key, 0)
        want_counts[key] = want_counts.get(key, 0) + 1


def test_it_is_small() -> None:
    rng = random.Random(0)
    tracemalloc.start()
    try:
        table = DigestMap()
        for line in range(50_000):
            table.setdefault(rng.randbytes(8), line)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 48 * 50_000 + 4096
