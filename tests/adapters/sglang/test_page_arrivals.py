"""PageArrivals: follows pages while they come, and no longer than its bounds."""

from __future__ import annotations

import contextlib

from pdstore.adapters.sglang.page_arrivals import PageArrivals
from pdstore.errors import StoreError
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from tests.support.clock import Clock
from tests.support.scripted_store import Scripted

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=64, num_shards=1)
KEYS = PromptKeys(NAMESPACE).extend(range(4 * 64))
STALL_S = 8.0


def followed(*script, num_found=0, until=1000.0, clock=None) -> tuple[list[int], Scripted]:
    """Returns the numbers that a store's answers lead to, and the store."""
    store = Scripted(*script)
    arrivals = PageArrivals(store, STALL_S, clock=clock or Clock(step=1.0))
    with contextlib.closing(arrivals):
        return list(arrivals.follow(KEYS, num_found, until)), store


def test_each_page_gives_the_next_one_its_time():
    """Four pages take longer than a stall may, and are followed all the same."""
    assert followed(0, 1, 1, 2, 2, 3, 3, 4)[0] == [1, 2, 3, 4]


def test_no_page_for_a_stall_is_the_end():
    numbers, store = followed(1, *[2] * 100)
    assert numbers == [1, 2]
    assert 90 < len(store.script) < 98


def test_what_is_known_is_not_told_again():
    assert followed(2, 2, 3, 4, num_found=2)[0] == [3, 4]


def test_it_looks_once_when_its_time_is_over():
    assert followed(3, 4, until=0.0)[0] == [3]


def test_an_error_of_the_store_is_the_end():
    assert followed(1, StoreError("away"), 4)[0] == [1]


def test_the_callers_time_between_two_pages_does_not_count():
    clock = Clock()
    with contextlib.closing(PageArrivals(Scripted(1, 2, 4), STALL_S, clock=clock)) as arrivals:
        numbers = []
        for number in arrivals.follow(KEYS, 0, 1000.0):
            numbers.append(number)
            clock.now += 2 * STALL_S
    assert numbers == [1, 2, 4]


def test_a_close_ends_it():
    arrivals = PageArrivals(Scripted(4), STALL_S)
    arrivals.close()
    assert list(arrivals.follow(KEYS, 0, 1000.0)) == []
