"""Three slots' keys and queries at every position, and the paged cache they lie in, for the tests of both attentions.

The cache is NaN wherever the step didn't write (case U08); blocks lie at random places.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

SCALE = 0.3
LENGTH = 160
Op = Callable[..., torch.Tensor]


class Part(NamedTuple):
    """`query_len` queries of a slot that end at position seq_len - 1; slot -1 is a padded request."""

    slot: int
    seq_len: int
    query_len: int


MIXED = [Part(1, 133, 5), Part(-1, 0, 3), Part(0, 70, 1), Part(2, 9, 9)]


class PagedModel:
    """What an attention's naive form is written for: `keys` and `queries` by slot and position."""

    def __init__(
        self, per_token: int, query: tuple[int, int], layout: int, block_size: int, seed: int, length: int = LENGTH
    ) -> None:
        """Cache columns a token, (heads, columns) of a query, the argument that says how cache columns are cut, and
        the positions of a slot."""
        torch.manual_seed(0)
        self.layout, self.block_size = layout, block_size
        self.keys = torch.randn(3, length, per_token)
        self.queries = torch.randn(3, length, *query)
        num_blocks = -(-length // block_size)
        generator = torch.Generator().manual_seed(seed)
        self.tables = torch.randperm(3 * num_blocks + 5, generator=generator)[: 3 * num_blocks].view(3, -1).int()

    def cache(
        self, parts: Sequence[Part], written_from: int = 0, holes: Sequence[tuple[int, int]] = ()
    ) -> torch.Tensor:
        """Return a cache with the parts' keys from a position on, NaN elsewhere and in the holes (slot, position)."""
        cache = torch.full((int(self.tables.max()) + 1, self.block_size, self.keys.shape[2]), torch.nan)
        for slot, seq_len, _ in parts:
            if slot >= 0:
                written = [p for p in range(written_from, seq_len) if (slot, p) not in holes]
                position = torch.tensor(written, dtype=torch.int64)
                block = self.tables[slot, position // self.block_size].long()
                cache[block, position % self.block_size] = self.keys[slot, position]
        return cache

    def args(self, parts: Sequence[Part], padding: int, key_start: int, cache: torch.Tensor, device: str) -> list[Any]:
        """Return the step's arguments, with rows of padding at the end."""
        none = torch.full(self.queries.shape[1:], torch.nan)
        rows = [self.queries[slot, end - n : end] if slot >= 0 else none[:n] for slot, end, n in parts]
        q = torch.cat([*rows, none[:padding]])
        lens = torch.tensor([0, *(part.query_len for part in parts)])
        return [
            q.to(device),
            cache.to(device),
            self.tables.to(device),
            torch.tensor([part.slot for part in parts], dtype=torch.int32, device=device),
            lens.cumsum(0).int().to(device),
            torch.tensor([part.seq_len for part in parts], dtype=torch.int32, device=device),
            self.layout,
            SCALE,
            max(part.query_len for part in parts),
            max(part.seq_len for part in parts),
            key_start,
        ]

    def run(
        self, op: Op, device: str, parts: Sequence[Part], padding: int = 0, key_start: int = 0, **cache_options: Any
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Return {(slot, position): result row}, having checked that padded requests' rows are zero."""
        cache = self.cache(parts, key_start, **cache_options)
        out = op(*self.args(parts, padding, key_start, cache, device)).cpu()
        results, row = {}, 0
        for slot, seq_len, query_len in parts:
            for position in range(seq_len - query_len, seq_len):
                if slot < 0:
                    assert not out[row].any()
                else:
                    results[slot, position] = out[row]
                row += 1
        return results
