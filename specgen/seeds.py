"""The seed of a row: a stable 63-bit hash, the same on every machine, in every order and in every run.

Knows how seeds derive from the run's seed and the row; knows nothing of noise (`kernels/gumbel.py`). Every seed is
0 <= s < 2^63, so that it fits a signed 64-bit tensor and may be given back as a recipe's seed.
"""

import hashlib
import secrets
from collections.abc import Sequence


def draw_seed() -> int:
    """Return a fresh run seed from the system's entropy."""
    return secrets.randbits(63)


def content_hash(prompt: str | Sequence[int], kind: str = "text") -> str:
    """Return 32 hex digits that depend on the prompt alone; a text and a list of ids never share them by design.

    kind: of a text; one of another kind has another hash.
    """
    if isinstance(prompt, str):
        # A lone surrogate may come out of JSON's \\ud800; it must hash, not raise.
        data = kind.encode() + b":" + prompt.encode("utf-8", "surrogatepass")
    else:
        data = b"ids:" + b",".join(b"%d" % token for token in prompt)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def row_key_of_id(row_id: str | int) -> str:
    """Return the row key of a user's id; the text "7" and the number 7 are two ids."""
    return f"id:{'int' if isinstance(row_id, int) else 'str'}:{row_id}"


def row_key_of_content(digest: str, occurrence: int) -> str:
    """Return the row key of a row without an id: its content hash and how many rows with it came before."""
    return f"content:{digest}:{occurrence}"


def row_seed(run_seed: int, row_key: str, sample_index: int = 0) -> int:
    """Return the seed of a row that brings none of its own: hash of (run seed, row key, sample index)."""
    return _hash("run", run_seed, row_key, sample_index)


def own_seed(seed: int, digest: str, sample_index: int = 0) -> int:
    """Return the seed of a row that brings one: hash of (that seed, content hash, sample index).

    The same prompt with the same seed repeats itself anywhere; one seed on many prompts gives each its own noise.
    """
    return _hash("row", seed, digest, sample_index)


def _hash(domain: str, seed: int, key: str, sample_index: int) -> int:
    data = f"{domain}\0{seed}\0{sample_index}\0{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
