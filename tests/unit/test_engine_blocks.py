"""Blocks are shared by their users, and free ones are reused by their contents until they are allocated again."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.blocks import PADDING_BLOCK, BlockKeys, BlockPool


def keys_of(tokens: list[int], root: str = "", size: int = 2) -> list[bytes]:
    return BlockKeys(root, np.array(tokens)[:, None], size).upto(len(tokens) // size)


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def published(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Allocate a block for each key and publish it."""
    blocks = taken(pool, len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_blocks_are_allocated_completely_or_not_at_all() -> None:
    pool = BlockPool(3, 2)
    blocks = taken(pool, 2)
    assert PADDING_BLOCK not in blocks
    assert pool.allocate(2) is None
    assert pool.available == 1
    pool.release(blocks)
    assert pool.available == 3
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_prefix_is_reused_while_it_is_used_and_afterwards() -> None:
    pool = BlockPool(4, 2)
    keys = keys_of([1, 2, 3, 4, 5, 6])
    blocks = published(pool, keys)
    assert pool.match(keys_of([1, 2, 3, 4, 9, 9])) == blocks[:2]
    pool.release(blocks)
    assert pool.available == 2, "two blocks have another user"
    pool.release(blocks[:2])
    assert pool.available == 4
    assert pool.match(keys) == blocks
    assert pool.available == 1


def test_the_least_recently_used_blocks_are_evicted_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, 2)
    first, second = keys_of([1, 1, 2, 2]), keys_of([3, 3, 4, 4])
    blocks = [published(pool, keys) for keys in (first, second)]
    pool.release(blocks[0])
    pool.release(blocks[1])
    pool.release(pool.match(first))  # used last
    taken(pool, 1)
    assert pool.match(second) == blocks[1][:1]
    pool.release(blocks[1][:1])
    taken(pool, 1)  # the first request's end: it was released before the second one's beginning
    assert pool.match(first) == blocks[0][:1]
    assert pool.match(second) == blocks[1][:1]


def test_blocks_without_contents_are_allocated_before_those_that_can_be_reused() -> None:
    pool = BlockPool(3, 2)
    keys = keys_of([1, 2])
    used, other = published(pool, keys), taken(pool, 1)
    pool.release(used)
    pool.release(other)
    taken(pool, 2)
    assert pool.match(keys) == used


def test_a_key_depends_on_root_contents_and_all_blocks_before() -> None:
    assert keys_of([1, 2, 3, 4]) == keys_of([1, 2, 3, 4])
    assert keys_of([1, 2, 3, 4])[0] == keys_of([1, 2, 9, 9])[0]
    assert keys_of([1, 2, 3, 4])[1] != keys_of([0, 2, 3, 4])[1]
    assert keys_of([1, 2])[0] != keys_of([1, 2], root="adapter")[0]


def test_discarded_blocks_are_not_reused_and_used_ones_stay() -> None:
    pool = BlockPool(4, 2)
    keys = keys_of([1, 2, 3, 4])
    blocks = published(pool, keys)
    assert pool.match(keys[:1]) == blocks[:1]
    pool.release(blocks)
    assert pool.discard(blocks) == blocks[1:]
    assert pool.match(keys) == blocks[:1]
    pool.forget_all()
    assert pool.match(keys) == []


def test_a_pool_grows_and_keeps_its_contents() -> None:
    pool = BlockPool(1, 2)
    keys = keys_of([1, 2])
    blocks = published(pool, keys)
    pool.release(blocks)
    pool.grow(3)
    assert sorted(taken(pool, 2)) == [2, 3]
    assert pool.match(keys) == blocks
