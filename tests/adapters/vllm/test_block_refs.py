"""BlockRefs: blocks come back when the last rank has released the save that held them."""

from __future__ import annotations

from collections import Counter

import pytest

from pdstore.adapters.vllm.block_refs import BlockRefs


class BlockPool:
    """vLLM's, as far as a save sees it; a block is its own number."""

    def __init__(self) -> None:
        self.blocks = range(100)
        self.refs: Counter[int] = Counter()

    def touch(self, blocks) -> None:
        self.refs.update(blocks)

    def free_blocks(self, blocks) -> None:
        self.refs.subtract(blocks)

    @property
    def held(self) -> set[int]:
        assert min(self.refs.values(), default=0) >= 0
        return set(+self.refs)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool()


def test_blocks_are_held_until_every_rank_has_released_them(pool):
    refs = BlockRefs(pool, num_ranks=3)
    refs.hold(7, [4, 5])
    refs.release({7: 1})
    refs.release({7: 1})
    assert pool.held == {4, 5}
    assert len(refs) == 1
    refs.release({7: 1})
    assert pool.held == set()
    assert not len(refs)


def test_several_ranks_may_release_in_one_report(pool):
    refs = BlockRefs(pool, num_ranks=2)
    refs.hold(0, [1])
    refs.release({0: 2})
    assert pool.held == set()


def test_a_block_that_is_named_twice_is_held_once(pool):
    refs = BlockRefs(pool, num_ranks=1)
    refs.hold(0, [1, 2, 1])
    assert pool.refs[1] == 1
    refs.release({0: 1})
    assert pool.held == set()


def test_saves_hold_the_same_block_independently(pool):
    refs = BlockRefs(pool, num_ranks=1)
    refs.hold(0, [1, 2])
    refs.hold(1, [2, 3])
    refs.release({0: 1})
    assert pool.held == {2, 3}
    refs.release({1: 1})
    assert pool.held == set()


def test_a_save_that_is_not_held_is_nothing(pool):
    refs = BlockRefs(pool, num_ranks=1)
    refs.hold(0, [1])
    refs.release({0: 1})
    refs.release({0: 1, 5: 1})
    assert pool.held == set()
