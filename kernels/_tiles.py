"""Which request a tile of queries belongs to, found on the device: what both attentions' grids are made of.

Request b's tiles start at number query_start_loc[b] // QUERIES + b, which leaves room for each.
"""

# mypy: ignore-errors

from specgen.kernels._triton import tl, triton


def looked_at(num_requests: int) -> int:
    """Return how many requests a kernel looks at for its tile's: a power of 16, since each has a kernel of its own."""
    most = 16
    while most < num_requests:
        most *= 16
    return most


@triton.jit
def find_tile(
    tile,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    QUERIES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Return a tile's (slot, -1 if padded, first row of q, number of queries (0: no such tile), first position).

    REQUESTS: as `looked_at` says; all of them are looked at with one load.
    """
    each = tl.arange(0, REQUESTS)
    starts = tl.load(query_start_loc_ptr + each, mask=each < num_requests, other=0) // QUERIES + each
    request = tl.sum(((starts <= tile) & (each < num_requests)).to(tl.int32), axis=0) - 1
    return tile_of_request(tile, request, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, QUERIES)


@triton.jit
def tile_of_request(tile, request, idx_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, QUERIES: tl.constexpr):
    """Return what `find_tile` returns, given the last request whose tiles start at or before this one."""
    row = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - row
    offset = (tile - (row // QUERIES + request)) * QUERIES
    slot = tl.load(idx_mapping_ptr + request)
    count = tl.minimum(tl.maximum(query_len - offset, 0), QUERIES)
    position = tl.load(seq_lens_ptr + request) - query_len + offset
    return slot.to(tl.int64), (row + offset).to(tl.int64), count, position


@triton.jit
def tile_place():
    """Return the place of this program's tile and heads among those of all programs, int64."""
    return (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def real_rows(row, count, first_head, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return which rows of a tile, that has HEADS of a group's heads from `first_head` on, belong to a query."""
    return (first_head + row % HEADS < GROUP) & (row // HEADS < count)


@triton.jit
def head_rows(row, q_row, num_heads, kv_head, first_head, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return where a tile's rows lie among tokens x heads."""
    return (q_row + row // HEADS) * num_heads + kv_head * GROUP + (first_head + row % HEADS)
