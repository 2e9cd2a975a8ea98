"""Which request a tile of queries belongs to, found on the device: what both attentions' grids are made of.

Request b's tiles start at number query_start_loc[b] // QUERIES + b, which leaves room for each.
"""

# mypy: ignore-errors

from specgen.kernels._triton import tl, triton


@triton.jit
def find_tile(
    tile, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, QUERIES: tl.constexpr, SEARCH: tl.constexpr
):
    """Return a tile's (slot, -1 if padded, first row of q, number of queries (0: no such tile), first position)."""
    low = 0
    high = num_requests
    for _ in tl.static_range(SEARCH):
        # The last request whose tiles start at or before this one; low stays below high.
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle) // QUERIES + middle
        here = (start <= tile) & (middle < high)
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    request = low
    row = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - row
    offset = (tile - (row // QUERIES + request)) * QUERIES
    slot = tl.load(idx_mapping_ptr + request)
    count = tl.minimum(tl.maximum(query_len - offset, 0), QUERIES)
    position = tl.load(seq_lens_ptr + request) - query_len + offset
    return slot.to(tl.int64), (row + offset).to(tl.int64), count, position
