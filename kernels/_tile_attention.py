"""How the CPU's attentions meet tiles of queries with chunks of keys. It knows slabs (`_mla_plan`), not caches.

A row's result has one arithmetic: its largest score over all chunks; each chunk's weights, their sum and their product
with the values by themselves; sums over the chunks from the first to the last that its tile sees. A chunk that the row
sees nothing of adds 0.
"""

import functools

import torch

from specgen.kernels._mla_plan import KEYS, Slab
from specgen.kernels.linear import item_product, rows_agree, rows_keep_bits

QUERIES = 4  # query tokens a tile
_NO_MAX = -1.0e30  # largest score of a row that sees no key: finite, so that -inf minus it is -inf


def tile_queries(heads: int, width: int, value_width: int, max_query_len: int) -> int:
    """Return how many query tokens a tile takes: no more than a step needs, where a row's bits don't depend on it.

    heads: rows a query has in a tile of `QUERIES`, each of `width` elements, to values of `value_width`.
    """
    return _tile_queries(heads, width, value_width, min(max_query_len, QUERIES), torch.get_num_threads())


@functools.cache
def _tile_queries(heads: int, width: int, value_width: int, wanted: int, threads: int) -> int:
    products = ((width, KEYS, True), (KEYS, value_width, False))
    whole = QUERIES * heads
    if not all(rows_keep_bits(whole, *product, torch.float32) for product in products):
        return 1
    for queries in (1, 2):
        rows = queries * _padded_heads(heads, queries)
        if queries >= wanted and all(rows_agree(rows, whole, *product, torch.float32) for product in products):
            return queries
    return QUERIES


def _padded_heads(heads: int, queries: int) -> int:
    """Return how many rows a query takes in a tile of so many: the libraries' products take rows by fours."""
    by = max(1, 4 // queries)
    return -(-heads // by) * by


def pad_heads(q: torch.Tensor, queries: int) -> torch.Tensor:
    """Return q `[..., H, D]`, its last head repeated until a tile of `queries` queries has as many rows as it wants."""
    padding = _padded_heads(q.shape[-2], queries) - q.shape[-2]
    return torch.cat([q, *[q[..., -1:, :]] * padding], -2) if padding else q


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slab: Slab) -> torch.Tensor:
    """Return the results of a slab's tiles `[n, h, rows, Dv] float32`; zeros for rows that see no key.

    q `[n, h, rows, D] float32`, scaled: h key heads, each of which a tile's rows (queries x heads) meet. keys
    `[g, h, KEYS, D]` and values `[g, h, KEYS, Dv]`, float32, both as `slab.slots` says; h is 1 where tiles share them.
    """
    num_tiles, heads, rows, width = q.shape
    actives = [chunk.active for chunk in slab.chunks]
    if slab.shared:
        tiles = q.view(num_tiles, rows, width)
        by_chunk = [item_product(tiles[:n], keys[i].transpose(1, 2).expand(n, -1, -1)) for i, n in enumerate(actives)]
        scores = torch.cat(by_chunk)
    else:
        items = q if len(actives) == 1 else q.index_select(0, slab.item_tiles)
        scores = item_product(items.view(-1, rows, width), keys.view(-1, KEYS, width).transpose(1, 2))
    scores = scores.view(-1, heads, rows, KEYS)
    for chunk, part in zip(slab.chunks, scores.split(actives), strict=True):
        if chunk.hidden is not None:
            by_query = part.view(chunk.active, heads, chunk.hidden.shape[1], -1, KEYS)
            by_query.masked_fill_(chunk.hidden[:, None], float("-inf"))

    first, *others = scores.amax(-1, keepdim=True).split(actives)
    row_max = first.clamp_(min=_NO_MAX)
    for top in others:
        top_so_far = row_max[: len(top)]
        torch.maximum(top_so_far, top, out=top_so_far)
    weights = scores.sub_(row_max if not others else row_max.index_select(0, slab.item_tiles)).exp_()
    row_sum = _added(list(weights.sum(-1, keepdim=True).split(actives)))

    if slab.shared:
        by_chunk = [
            item_product(part.view(-1, rows, KEYS), values[i].expand(len(part), -1, -1)).unsqueeze(1)
            for i, part in enumerate(weights.split(actives))
        ]
        out = _added(by_chunk)
    else:
        products = item_product(weights.view(-1, rows, KEYS), values.view(-1, KEYS, values.shape[-1]))
        out = _added(list(products.view(-1, heads, rows, values.shape[-1]).split(actives)))
    out.div_(row_sum)
    if slab.has_empty_rows:
        out.masked_fill_(row_sum == 0, 0.0)
    return out


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum over the chunks, in order; into the first part, which all tiles have."""
    total = parts[0]
    for part in parts[1:]:
        total[: len(part)].add_(part)
    return total
