"""The block pool: free list, eviction, duplicates."""

from __future__ import annotations

import pytest

from engine.kv.blocks import BlockPool


def hashed(pool: BlockPool, name: bytes) -> int:
    """One block that holds the content ``name``."""
    (block,) = pool.allocate(1)
    pool.set_hashes([block], [name])
    return block


def test_rule_1_block_0_is_never_handed_out_and_usage_leaves_it_out() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    pool.check({1: 1, 2: 1, 3: 1, 4: 1})


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_usable_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="block 0 is the null block"):
        BlockPool(num_blocks)


def test_rule_2_popping_a_hashed_block_evicts_its_hash_at_that_moment() -> None:
    pool = BlockPool(3)
    block = hashed(pool, b"x")
    pool.free([block])
    assert pool.free_list() == [2, 1]
    assert pool.lookup(b"x") == block  # free, and still findable
    pool.allocate(1)
    assert pool.lookup(b"x") == block
    pool.allocate(1)
    assert pool.lookup(b"x") is None
    pool.check({1: 1, 2: 1})


def test_rule_3_hashed_blocks_go_to_the_tail_in_reverse_and_others_to_the_head() -> None:
    pool = BlockPool(8)
    table = [hashed(pool, b"first"), hashed(pool, b"second"), *pool.allocate(2)]
    pool.free(table)
    assert pool.free_list() == [3, 4, 5, 6, 7, 2, 1]  # the end of the sequence is reused before its beginning
    pool.check({})


def test_rule_3_a_block_with_another_holder_is_not_freed() -> None:
    pool = BlockPool(3)
    block = hashed(pool, b"x")
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 1
    pool.check({block: 1})
    pool.free([block])
    assert pool.num_free == 2


def test_rule_4_a_lookup_takes_nothing_and_touching_takes_off_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    blocks = [hashed(pool, name) for name in (b"a", b"b", b"c")]
    for block in blocks:
        pool.free([block])
    assert pool.free_list() == [4, 1, 2, 3]
    pool.lookup(b"b")
    assert pool.free_list() == [4, 1, 2, 3]
    assert pool.count_free(blocks) == 3
    pool.touch([2])
    assert pool.free_list() == [4, 1, 3]
    assert pool.count_free(blocks) == 2
    pool.check({2: 1})


def test_rule_3_the_least_recently_used_content_dies_first() -> None:
    pool = BlockPool(4)
    for name in (b"a", b"b", b"c"):
        pool.free([hashed(pool, name)])
    pool.touch([1])
    pool.free([1])  # a was used again: b is the oldest now
    pool.allocate(1)
    assert [pool.lookup(name) for name in (b"a", b"b", b"c")] == [1, None, 3]


def test_rule_6_of_equal_hashes_the_first_inserted_is_returned_then_the_next() -> None:
    pool = BlockPool(4)
    first, second, third = (hashed(pool, b"x") for _ in range(3))
    assert pool.lookup(b"x") == first
    pool.free([second])
    pool.allocate(1)  # evicts the second: it was in the middle
    assert pool.lookup(b"x") == first
    pool.free([first])
    pool.allocate(1)
    assert pool.lookup(b"x") == third
    assert pool.hash_of(third) == b"x"
    pool.check({1: 1, 2: 1, 3: 1})


def test_rule_6_an_evicted_duplicate_leaves_no_trace() -> None:
    pool = BlockPool(3)
    hashed(pool, b"x")
    second = hashed(pool, b"x")
    pool.free([second])
    pool.allocate(1)
    pool.free([1])
    pool.allocate(1)
    assert pool.lookup(b"x") is None
    pool.check({1: 1, 2: 1})


def test_rule_7_content_is_forgotten_only_while_every_block_is_free() -> None:
    pool = BlockPool(3)
    block = hashed(pool, b"x")
    assert not pool.reset_hashes()
    assert pool.lookup(b"x") == block
    pool.free([block])
    assert pool.reset_hashes()
    assert pool.lookup(b"x") is None
    pool.check({})


def test_more_than_is_free_is_a_fault_of_the_caller() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)


@pytest.mark.parametrize("damage", ["refs", "free", "index"])
def test_check_finds_damage(damage: str) -> None:
    pool = BlockPool(4)
    block = hashed(pool, b"x")
    pool.check({block: 1})
    if damage == "refs":
        pool._refs[block] += 1
    elif damage == "free":
        pool._unlink(2)
    else:
        pool._index.clear()
    with pytest.raises(AssertionError):
        pool.check({block: 1})
