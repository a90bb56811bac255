"""Room in an arena for values of several sizes: made for all of them, or nothing goes."""

from __future__ import annotations

import contextlib
import random

import pytest

from pdstore.errors import StoreFull
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put

MIB = 1 << 20
PAGE = 4096
SLAB = 64 << 10
PAGES_PER_SLAB = SLAB // PAGE
PAGES = (1, 2, 3, 4, 5, 8, 9, 16)  # of values: 1 to 16 have room in a slab


@pytest.fixture
def arena(open_arena):
    """16 slabs, of which the pool's id holds one."""
    store = open_arena(size=MIB, slab_bytes=SLAB, lease_s=60)
    put(store, [POOL_ID_KEY], [bytes(64)])
    return store


def fill_with_leased(store, rng: random.Random) -> dict[BlockKey, int]:
    """Puts values of random sizes into an arena without room for them all, and leases them.

    Returns the bytes of each.
    """
    sizes: dict[BlockKey, int] = {}
    for _ in range(250):
        [key], num_bytes = fresh_keys(1), rng.choice(PAGES) * PAGE - rng.randrange(100)
        with contextlib.suppress(StoreFull):
            put(store, [key], [content(key, num_bytes)])
            sizes[key] = num_bytes
    keys = rng.sample(list(sizes), len(sizes))  # so the oldest lie in all slabs
    return {key: sizes[key] for key in keys if store.match([key])}


@pytest.mark.parametrize("seed", range(5))
def test_room_is_made_for_values_of_several_sizes_or_nothing_goes(seed, arena):
    rng = random.Random(seed)
    answers = set()
    for _ in range(12):
        there = fill_with_leased(arena, rng)
        own = rng.sample(list(there), min(len(there), rng.choice([0, 0, 1, 3])))
        new = fresh_keys(rng.randrange(1, 70))
        few = rng.sample(PAGES, rng.choice([1, 2, 3]))
        sizes = [rng.choice(few) * PAGE for _ in new]
        has_room = arena.make_room([*own, *new], [*[there[key] for key in own], *sizes])
        answers.add(has_room)
        if has_room:
            values = [content(key, size) for key, size in zip(new, sizes, strict=True)]
            assert put(arena, new, values) == len(new)
            assert all(arena.which_stored([POOL_ID_KEY, *own, *new]))
            assert get(arena, new, sizes) == values
            arena.remove(new)
        else:
            assert all(arena.which_stored([POOL_ID_KEY, *there])), "nothing went in vain"
    assert answers == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_what_the_slabs_can_hold_has_room_and_no_more(seed, arena):
    """Each size takes whole slabs; only one page has room beside the pool's id as well."""
    rng = random.Random(seed)
    fill_with_leased(arena, rng)
    answers = set()
    for _ in range(25):
        numbers = {pages: rng.randrange(0, 30) for pages in rng.sample(PAGES, 3)}
        sizes = [pages * PAGE for pages, count in numbers.items() for _ in range(count)]
        if not sizes:
            continue
        numbers[1] = max(0, numbers.get(1, 0) - (PAGES_PER_SLAB - 1))
        needed = sum(-(-count // (PAGES_PER_SLAB // pages)) for pages, count in numbers.items())
        assert arena.make_room(fresh_keys(len(sizes)), sizes) == (needed <= 15)
        answers.add(needed <= 15)
        fill_with_leased(arena, rng)
    assert answers == {True, False}


def test_the_values_used_longest_ago_go_for_several_sizes(arena):
    old, young = fresh_keys(28), fresh_keys(28)
    for key in [*old, *young]:  # seven slabs each, and one is unused
        put(arena, [key], [content(key, 4 * PAGE)])
        assert arena.match([key]) == 1
    new, sizes = fresh_keys(7), [4 * PAGE] * 5 + [16 * PAGE] * 2
    assert arena.make_room(new, sizes)
    assert all(arena.which_stored([*old[9:], *young])), "no more than needed"
    assert put(arena, new, [content(key, size) for key, size in zip(new, sizes, strict=True)]) == 7


@pytest.mark.parametrize("first", [4, 16], ids=["small first", "large first"])
def test_small_values_break_no_slab_that_large_ones_need(first, arena):
    """The oldest values of four pages lie in 15 slabs, and 15 new ones have room in four."""
    keys = fresh_keys(60)
    for key in keys:
        put(arena, [key], [content(key, 4 * PAGE)])
    for key in [*keys[::4], *keys[1::4], *keys[2::4], *keys[3::4]]:
        assert arena.match([key]) == 1
    pages = sorted([4] * 15 + [16] * 11, reverse=first == 16)
    new, sizes = fresh_keys(26), [count * PAGE for count in pages]
    assert not arena.make_room(fresh_keys(27), [*sizes, 16 * PAGE])
    assert all(arena.which_stored(keys)), "nothing went in vain"
    assert arena.make_room(new, sizes)
    assert put(arena, new, [content(key, size) for key, size in zip(new, sizes, strict=True)]) == 26
