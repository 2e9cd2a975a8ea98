"""How the CPU's attentions cut a step into tiles of queries and chunks of keys. It knows positions, not numbers.

A tile has a fixed number of query rows and meets the chunks in a fixed order, counted from position 0; which tiles run
together is a matter of speed alone.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

KEYS = 64  # keys a chunk
# Items (a tile and a chunk) whose keys are gathered at once, and those of tiles that share one gathered copy.
_SLAB_ITEMS = 192
_SHARED_ITEMS = 512
_SHARING_TILES = 8  # from so many tiles on, a request's tiles use one gathered copy of its keys


class Chunk(NamedTuple):
    """One chunk of keys for the first `active` tiles of a slab."""

    active: int
    hidden: torch.Tensor | None  # [active, Q, 1, KEYS] bool, keys that a query doesn't see


class Slab(NamedTuple):
    """Tiles that run together, the one with the furthest last position first: a chunk's tiles are always a prefix."""

    num_tiles: int
    token_rows: torch.Tensor  # [n * Q] rows of q; a short tile repeats its last one
    used: torch.Tensor | None  # which of them carry a query; None: all
    out_rows: torch.Tensor  # their rows of the output
    has_empty_rows: bool  # some query sees no key at all
    shared: bool  # one gathered copy of each chunk's keys does for all tiles
    chunks: list[Chunk]
    slots: torch.Tensor  # [g * KEYS] int64, cache slots to gather: of each chunk, for each of its tiles or once
    mixed: torch.Tensor | None  # which of them some query of a tile sees and an earlier one doesn't
    item_tiles: torch.Tensor  # [sum of active] int64, the tile of each chunk's items
    cache_rows: dict[tuple[int, ...], torch.Tensor]  # what the layers of a step make of `slots`, by the form of a cache


@functools.lru_cache(maxsize=4)
def plan_slabs(
    is_real: bytes,
    query_start_loc: bytes,
    seq_lens: bytes,
    tables: bytes,
    block_size: int,
    queries: int,
    key_start: int,
) -> list[Slab]:
    """Return the step's slabs. Kept by content, as every layer of a step asks for the same."""
    starts = np.frombuffer(query_start_loc, dtype=np.int32).astype(np.int64)
    query_lens = np.where(np.frombuffer(is_real, dtype=np.bool_), np.diff(starts), 0)
    num_tiles = -(-query_lens // queries)
    request = np.repeat(np.arange(len(query_lens)), num_tiles)
    offset = (np.arange(len(request)) - (np.cumsum(num_tiles) - num_tiles)[request]) * queries
    first = np.frombuffer(seq_lens, dtype=np.int32)[request] - query_lens[request] + offset
    count = np.minimum(query_lens[request] - offset, queries)
    order = np.argsort(-(first + count), kind="stable")
    order = order[(first + count)[order] > 0]
    long = num_tiles[request[order]] >= _SHARING_TILES
    last = first + count - 1
    groups = []
    for r in np.unique(request[order[long]]):
        groups += _cut(order[request[order] == r], last, key_start, _SHARED_ITEMS)
    groups += _cut(order[~long], last, key_start, _SLAB_ITEMS)
    block_tables = np.frombuffer(tables, dtype=np.int32).reshape(len(query_lens), -1)
    return [
        _plan_slab(
            (starts[request] + offset)[group],
            count[group],
            first[group],
            block_tables[request[group]],
            block_size,
            queries,
            key_start,
        )
        for group in groups
    ]


def _cut(tiles: np.ndarray, last: np.ndarray, key_start: int, num_items: int) -> list[np.ndarray]:
    """Return the tiles, those with the furthest last position first, in groups of about so many items."""
    groups = []
    while len(tiles):
        num_chunks = max(int(last[tiles[0]]) - key_start, 0) // KEYS + 1
        size = max(1, num_items // num_chunks)
        groups.append(tiles[:size])
        tiles = tiles[size:]
    return groups


def _plan_slab(
    first_row: np.ndarray,
    count: np.ndarray,
    first: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    queries: int,
    key_start: int,
) -> Slab:
    """Return a slab of tiles, each with its first row of q, number of queries, first position and block table."""
    in_tile = np.arange(queries)
    used = (in_tile < count[:, None]).reshape(-1)
    token_rows = (first_row[:, None] + np.minimum(in_tile, count[:, None] - 1)).reshape(-1)
    last = first + count - 1
    share = len(first) >= _SHARING_TILES and bool((block_tables == block_tables[0]).all())
    chunks: list[Chunk] = []
    slots, mixed = [], []
    num_gathered = 0
    origin = key_start - key_start % KEYS
    for start in range(origin, max(int(last[0]), origin) + 1, KEYS):
        active = len(first) if start == origin else int(np.count_nonzero(last >= start))
        gathered = 1 if share else active
        positions = np.arange(start, start + KEYS)
        seen = (positions >= key_start) & (positions <= last[:gathered, None])
        # A hidden column stands for the request's first key, which is written whenever any of its keys is.
        key = np.where(seen, positions, np.minimum(key_start, last[:gathered, None]))
        blocks = block_tables[np.arange(gathered)[:, None], key // block_size].astype(np.int64)
        slots.append((blocks * block_size + key % block_size).reshape(-1))
        first_seen = first[:active].min() if share else first[:active, None]
        mixed.append(num_gathered * KEYS + np.flatnonzero(seen & (positions > first_seen)))
        num_gathered += gathered
        hidden = (positions > (first[:active, None] + in_tile)[:, :, None]) | (positions < key_start)
        chunks.append(Chunk(active, torch.from_numpy(hidden[:, :, None]) if hidden.any() else None))
    all_mixed = np.concatenate(mixed)
    return Slab(
        len(first),
        torch.from_numpy(token_rows),
        None if used.all() else torch.from_numpy(np.flatnonzero(used)),
        torch.from_numpy(token_rows[used]),
        bool(first.min() < key_start),
        share,
        chunks,
        torch.from_numpy(np.concatenate(slots)),
        torch.from_numpy(all_mixed) if len(all_mixed) else None,
        torch.from_numpy(np.concatenate([np.arange(chunk.active) for chunk in chunks])),
        {},
    )
