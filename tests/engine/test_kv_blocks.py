"""Blocks are conserved, and what the prefix cache gives out is what was computed. Block 0 belongs to nobody."""

from __future__ import annotations

import random

import pytest

from specgen.engine.kv_blocks import NULL_BLOCK, BlockPool, KVBlockManager, hash_block
from specgen.engine.request import Request
from specgen.sampling_params import SamplingParams

BLOCK = 4


def request(request_id: int, token_ids: list[int]) -> Request:
    return Request(request_id, token_ids, SamplingParams(), 0, 100, frozenset(), frozenset(), token_ids=list(token_ids))


def manager(num_blocks: int = 20, caching: bool = True, max_model_len: int = 64) -> KVBlockManager:
    return KVBlockManager(num_blocks, BLOCK, max_model_len, caching)


def computed(kv: KVBlockManager, request_id: int, token_ids: list[int]) -> Request:
    """A request whose tokens but the last are computed, verified and published."""
    r = request(request_id, token_ids)
    r.num_computed_tokens = kv.match_prefix(r)
    assert kv.allocate_slots(r, len(token_ids) - r.num_computed_tokens, 0) is not None
    r.num_computed_tokens = len(token_ids)
    kv.publish(r, len(token_ids) - 1)
    kv.check()
    return r


def cached_tokens(kv: KVBlockManager, token_ids: list[int]) -> int:
    """Tokens that a new request with these ids would find; the pool's order may change."""
    probe = request(-1, token_ids)
    found = kv.match_prefix(probe)
    kv.forget(probe)
    return found


# the pool


def test_a_new_pool_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(6)
    assert pool.num_free_blocks == 5
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.num_free_blocks == 0


def test_the_least_recently_freed_cached_block_goes_first() -> None:
    pool = BlockPool(5)
    for block in pool.allocate(4):
        pool.publish(block, bytes([block]))
    for block in (3, 1, 4, 2):
        pool.free([block])
    pool.touch([1])
    pool.free([1])  # used again: now the youngest
    assert pool.allocate(4) == [3, 4, 2, 1]


def test_blocks_without_a_hash_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"first")
    pool.free([first])
    pool.free([second])
    pool.free([third])
    assert set(pool.allocate(2)) == {second, third}
    assert pool.cached == {b"first": first}


def test_a_block_handed_out_again_is_forgotten() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"old")
    pool.free([block])
    assert pool.cached == {b"old": block}
    assert pool.allocate(1) == [block]
    assert not pool.cached and not pool.block_hash


def test_the_first_block_with_a_hash_stays() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.cached == {b"same": first} and pool.block_hash == {first: b"same"}


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"x")
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 1
    pool.free(blocks)
    assert pool.num_free_blocks == 2


# the prefix cache


def test_a_prefix_outlives_its_continuation() -> None:
    kv = manager(num_blocks=6)
    r = computed(kv, 1, list(range(17)))  # 5 blocks, 4 of them full
    table = list(kv.block_ids(r))
    kv.free(r)
    taken = request(2, [60] * 12)
    kv.match_prefix(taken)
    assert kv.allocate_slots(taken, 12, 0) == [table[4], table[3], table[2]]
    kv.check()
    assert cached_tokens(kv, list(range(17))) == 8


def test_only_full_verified_blocks_whose_next_token_is_known_are_published() -> None:
    for num_tokens in range(1, 14):
        for num_verified in range(num_tokens + 1):
            kv = manager()
            r = request(1, list(range(num_tokens)))
            kv.match_prefix(r)
            kv.allocate_slots(r, num_tokens, 0)
            kv.publish(r, num_verified)
            want = min(num_verified, num_tokens - 1) // BLOCK
            assert len(kv.pool.cached) == want, (num_tokens, num_verified)
            assert sorted(kv.pool.block_hash) == sorted(kv.block_ids(r)[:want])


def test_publishing_in_pieces_equals_publishing_at_once() -> None:
    pieces, once = manager(), manager()
    ids = list(range(30, 51))
    computed(once, 1, ids)
    r = request(1, ids)
    pieces.match_prefix(r)
    pieces.allocate_slots(r, len(ids), 0)
    for num_verified in range(len(ids)):
        pieces.publish(r, num_verified)
    assert pieces.pool.cached == once.pool.cached


def test_a_block_is_matched_together_with_the_token_after_it() -> None:
    kv = manager()
    computed(kv, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached_tokens(kv, [1, 2, 3, 4]) == 0, "its next token is not known"
    assert cached_tokens(kv, [1, 2, 3, 4, 60]) == 0, "draft KV of position 3 was made with token 5"
    assert cached_tokens(kv, [1, 2, 3, 4, 5]) == 4
    assert cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 60]) == 4
    assert cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert cached_tokens(kv, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_equal_blocks_behind_different_prefixes_differ() -> None:
    same = [9, 9, 9, 9, 9]
    assert hash_block(hash_block(b"", [1, *same], 0, BLOCK), same, 0, BLOCK) != hash_block(b"", same, 0, BLOCK)
    kv = manager()
    computed(kv, 1, [1, 1, 1, 1, 9, 9, 9, 9, 9])
    assert cached_tokens(kv, [9, 9, 9, 9, 9]) == 0
    assert cached_tokens(kv, [2, 1, 1, 1, 9, 9, 9, 9, 9]) == 0


def test_a_match_shares_blocks_and_leaves_a_token_to_compute() -> None:
    kv = manager()
    first = computed(kv, 1, list(range(13)))
    second = request(2, list(range(13)))
    assert kv.match_prefix(second) == 12
    assert kv.block_ids(second) == kv.block_ids(first)[:3]
    kv.check()
    kv.free(first)
    kv.check()
    assert kv.num_slots(second) == 12


def test_without_prefix_caching_nothing_is_published_or_found() -> None:
    kv = manager(caching=False)
    computed(kv, 1, list(range(20)))
    assert not kv.pool.cached
    assert cached_tokens(kv, list(range(20))) == 0


# slots


def test_slots_cover_new_and_lookahead_tokens_up_to_the_limit() -> None:
    kv = manager(max_model_len=18)
    r = request(1, list(range(9)))
    kv.match_prefix(r)
    assert kv.allocate_slots(r, 9, 3) == [1, 2, 3]  # 12 slots
    r.num_computed_tokens = 9
    assert kv.allocate_slots(r, 1, 2) == []
    assert kv.allocate_slots(r, 1, 3) == [4]
    r.num_computed_tokens = 16
    assert kv.allocate_slots(r, 1, 50) == [5], "18 tokens at most"
    kv.check()


def test_too_few_blocks_take_nothing() -> None:
    kv = manager(num_blocks=4)
    r = request(1, list(range(20)))
    kv.match_prefix(r)
    assert kv.allocate_slots(r, 13, 0) is None
    assert kv.pool.num_free_blocks == 3 and kv.block_ids(r) == []
    kv.check()


# conservation


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_conserve_blocks_and_keep_the_cache_true(seed: int) -> None:
    """`content` is what a device would have written; every match must find exactly its own tokens there."""
    rng = random.Random(seed)
    kv = manager(num_blocks=rng.choice([4, 9, 30]), caching=seed != 5)
    content: dict[int, tuple[int, ...]] = {}
    live: list[Request] = []
    for i in range(400):
        action = rng.random()
        if action < 0.4 or not live:
            r = request(i, [rng.randrange(2) for _ in range(rng.randint(1, 14))])
            r.num_computed_tokens = found = kv.match_prefix(r)
            assert found % BLOCK == 0 and found < r.num_tokens
            for block, at in zip(kv.block_ids(r), range(0, found, BLOCK), strict=True):
                assert content[block] == tuple(r.token_ids[: at + BLOCK + 1])
            live.append(r)
        elif action < 0.8:
            r = rng.choice(live)
            r.token_ids += [rng.randrange(2) for _ in range(rng.randint(0, 5))]
            num_new = r.num_tokens - r.num_computed_tokens
            if kv.allocate_slots(r, num_new, rng.randint(0, 4)) is not None:
                table = kv.block_ids(r)
                for at in range(r.num_computed_tokens // BLOCK * BLOCK, r.num_tokens - BLOCK, BLOCK):
                    content[table[at // BLOCK]] = tuple(r.token_ids[: at + BLOCK + 1])
                r.num_computed_tokens = r.num_tokens - 1
                kv.publish(r, r.num_tokens - 1)
        else:
            kv.forget(live.pop(rng.randrange(len(live))))
        kv.check()
        assert NULL_BLOCK not in {block for r in live for block in kv.block_ids(r)}
    for r in live:
        kv.free(r)
    kv.check()
    assert kv.pool.num_free_blocks == kv.pool.num_blocks - 1


def planted(kv: KVBlockManager, fault: str) -> None:
    pool, table = kv.pool, kv.block_ids(request(1, []))
    if fault == "leak":
        pool.allocate(1)
    elif fault == "lost":
        pool._free.popitem()
    elif fault == "two owners":
        kv._tables[7] = [table[0]]
    elif fault == "twice in a table":
        table.append(table[0])
        pool.ref_counts[table[0]] += 1
    elif fault == "free and owned":
        pool._free[table[0]] = None
    elif fault == "null block":
        pool.ref_counts[NULL_BLOCK] = 1
        kv._tables[7] = [NULL_BLOCK]
    elif fault == "index to another block":
        pool.cached[next(iter(pool.cached))] = table[-1]
    elif fault == "index entry lost":
        pool.cached.popitem()


@pytest.mark.parametrize(
    "fault",
    [
        "leak",
        "lost",
        "two owners",
        "twice in a table",
        "free and owned",
        "null block",
        "index to another block",
        "index entry lost",
    ],
)
def test_check_finds_a_planted_fault(fault: str) -> None:
    kv = manager()
    computed(kv, 1, list(range(10)))
    kv.check()
    planted(kv, fault)
    with pytest.raises((AssertionError, KeyError)):
        kv.check()


def test_a_request_that_comes_again_is_hashed_as_far_as_it_has_grown() -> None:
    """Preempted, it keeps its tokens and gets more: what it left is found, and what it adds is published."""
    kv = manager()
    r = computed(kv, 1, list(range(10)))
    kv.free(r)
    r.token_ids += [50, 51, 52, 53]
    assert kv.match_prefix(r) == 8
    r.num_computed_tokens = 8
    assert kv.allocate_slots(r, 6, 0) is not None
    kv.publish(r, 13)
    kv.check()
    kv.forget(r)
    assert not kv._hashes and not kv._num_published and not kv._tables
    assert cached_tokens(kv, [*range(10), 50, 51, 52, 53]) == 12
