"""KV blocks: who owns which, and which of them can be reused by prefix.

Knows block numbers, reference counts and hashes; nothing of tensors. Block 0 is the null block: it is never handed out,
block tables are filled with it, and a slot in it is never written.

A block of the draft layers' KV depends on the token that follows the block (position p of an MTP layer embeds token
p+1), so a full block is hashed together with its following token, and published once that token is known and verified.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from specgen.engine.request import Request

NULL_BLOCK = 0


def hash_block(parent: bytes, token_ids: list[int], start: int, block_size: int) -> bytes:
    """16-byte hash of the block at `start`: its predecessor's hash, its tokens and the one token after them."""
    tokens = array("q", token_ids[start : start + block_size + 1])
    assert len(tokens) == block_size + 1
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with an LRU free list; free blocks keep their hash until they are handed out again."""

    def __init__(self, num_blocks: int) -> None:
        """A pool of `num_blocks` blocks, the null block included."""
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.block_hash: dict[int, bytes] = {}
        self.cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds (some may still be found by hash)."""
        return len(self._free)

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with one reference each, least recently used first. The caller checked `num_free_blocks`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block in blocks:
            self._forget(block)
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Takes one more reference on blocks found by hash."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Gives back one reference of each block, the last block first, so that a prefix outlives its continuation."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self.block_hash:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes a full, verified block findable; the first block with a hash stays."""
        if block_hash not in self.cached and block not in self.block_hash:
            self.cached[block_hash] = block
            self.block_hash[block] = block_hash

    def _forget(self, block: int) -> None:
        block_hash = self.block_hash.pop(block, None)
        if block_hash is not None:
            del self.cached[block_hash]


class KVBlockManager:
    """Block tables of the requests over one pool, and the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, enable_prefix_caching: bool) -> None:
        """`num_blocks` includes the null block; lengths are in tokens."""
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}
        self._hashes: dict[int, list[bytes]] = {}  # of a request's blocks, as far as they were ever asked for
        self._num_published: dict[int, int] = {}

    def block_ids(self, request: Request) -> list[int]:
        """The request's blocks, in token order."""
        return self._tables.get(request.request_id, [])

    def max_request_tokens(self) -> int:
        """Tokens that one request can have computed when it owns the whole pool."""
        return (self.pool.num_blocks - 1) * self.block_size

    def match_prefix(self, request: Request, use_cache: bool = True) -> int:
        """Gives the request the cached blocks of its longest known prefix, none unless `use_cache`; returns the tokens
        they hold.

        At most `num_tokens - 1`, since a block is matched together with the token after it: one is left to compute.
        """
        assert not self._tables.get(request.request_id)
        blocks: list[int] = []
        if self.enable_prefix_caching and use_cache:
            for i in range((request.num_tokens - 1) // self.block_size):
                block = self.pool.cached.get(self._hash(request, i))
                if block is None:
                    break
                blocks.append(block)
        self.pool.touch(blocks)
        self._tables[request.request_id] = blocks
        self._num_published[request.request_id] = len(blocks)
        return len(blocks) * self.block_size

    def _hash(self, request: Request, i: int) -> bytes:
        """Hash of the request's block `i`; hashes are made once, in order."""
        hashes = self._hashes.setdefault(request.request_id, [])
        while len(hashes) <= i:
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, request.token_ids, len(hashes) * self.block_size, self.block_size))
        return hashes[i]

    def allocate_slots(self, request: Request, num_new_tokens: int, num_lookahead_tokens: int) -> list[int] | None:
        """Slots for computed + new + lookahead tokens, capped at the model's limit; returns the blocks added.

        None, and nothing taken, when the pool has too few free blocks.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            table = self._tables[request.request_id] = []
        num_needed = self.num_missing_blocks(request, num_new_tokens + num_lookahead_tokens)
        if not num_needed:
            return []
        if num_needed > self.pool.num_free_blocks:
            return None
        blocks = self.pool.allocate(num_needed)
        table.extend(blocks)
        return blocks

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `allocate_slots` would take for so many tokens, lookahead among them."""
        num_slots, num_held = request.num_computed_tokens + num_new_tokens, len(self.block_ids(request))
        if num_slots <= num_held * self.block_size:
            return 0
        return max(0, -(-min(num_slots, self.max_model_len) // self.block_size) - num_held)

    def num_slots(self, request: Request) -> int:
        """Slots that the request's blocks hold."""
        return len(self.block_ids(request)) * self.block_size

    def publish(self, request: Request, num_verified_tokens: int) -> None:
        """Makes the request's full blocks findable: the KV of `num_verified_tokens` tokens is final."""
        if not self.enable_prefix_caching:
            return
        first = self._num_published.get(request.request_id, 0)
        num_final = len(request.token_ids) - 1
        last = (num_verified_tokens if num_verified_tokens < num_final else num_final) // self.block_size
        if last <= first:
            return
        table = self._tables[request.request_id]
        for i in range(first, last):
            self.pool.publish(table[i], self._hash(request, i))
        self._num_published[request.request_id] = last

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request, which may come again."""
        self.pool.free(self._tables.pop(request.request_id, []))
        self._num_published.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """Gives back all blocks of the request, which has ended."""
        self.free(request)
        self._hashes.pop(request.request_id, None)

    def check(self) -> None:
        """Raises AssertionError unless free + owned = all, and references equal the tables that hold a block."""
        pool = self.pool
        counts = [0] * pool.num_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a block is twice in one table"
            for block in table:
                counts[block] += 1
        assert counts == pool.ref_counts, "reference counts differ from the tables"
        assert counts[NULL_BLOCK] == 0, "the null block is owned"
        free = set(pool._free)
        owned = {block for block in range(pool.num_blocks) if counts[block]}
        assert not free & owned, "a block is free and owned"
        assert len(free) + len(owned) + 1 == pool.num_blocks, "a block is lost"
        for block_hash, block in pool.cached.items():
            assert pool.block_hash[block] == block_hash, "the hash index disagrees"
        assert len(pool.cached) == len(pool.block_hash), "the hash index disagrees"
