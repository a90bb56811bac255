"""MemoryStore keeps the contract, shares by name, and evicts by use."""

from __future__ import annotations

import contextlib
import secrets

import hypothesis
import pytest

from pdstore.store.memory import MemoryStore
from pdstore.testing import StoreTests, fresh_keys
from pdstore.testing.values import put
from tests.support.clock import Clock
from tests.support.random_calls import PLAY, play_random_calls

[KEY] = fresh_keys(1)


class PlantedStore(MemoryStore):
    """Takes values that no call of the contract could put."""

    def plant(self, key, data):
        self._shelf.add(key, data)


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self):
        with contextlib.closing(PlantedStore(f"memory://{secrets.token_hex(8)}")) as store:
            yield store

    @pytest.fixture
    def peer(self, store):
        with contextlib.closing(MemoryStore(store.label)) as peer:
            yield peer

    @pytest.fixture
    def small_store(self):
        with contextlib.closing(MemoryStore(budget=24 * 64 << 10)) as store:
            yield store

    def write_raw(self, store, key, data):
        store.plant(key, data)


def test_random_calls_agree_with_a_dict():
    play_random_calls(MemoryStore, hypothesis.settings(PLAY, max_examples=50))


def test_stores_of_one_name_share_values_until_the_last_one_closes():
    with contextlib.closing(MemoryStore("memory://shared")) as second:
        with contextlib.closing(MemoryStore("memory://shared")) as first:
            put(first, [KEY], [b"x"])
        assert second.match([KEY]) == 1
        with contextlib.closing(MemoryStore("memory://Shared")) as other:
            assert other.match([KEY]) == 0
    with contextlib.closing(MemoryStore("memory://shared")) as again:
        assert again.match([KEY]) == 0


@pytest.fixture
def clock():
    return Clock()


def test_a_use_begins_no_lease_and_ends_none():
    clock, keys = Clock(), fresh_keys(8)
    with contextlib.closing(MemoryStore(budget=4, lease_s=100.0, clock=clock)) as store:
        put(store, keys[:4], [b"x"] * 4)
        store.match(keys[:1])
        clock.now += 60.0
        store.use([*keys[:3], keys[7]])
        put(store, keys[4:5], [b"x"])
        assert store.which_stored(keys[:4]) == [True, True, True, False]
        clock.now += 2.0
        put(store, keys[5:7], [b"x"] * 2)
        assert store.which_stored(keys[:4]) == [True, False, False, False]


def test_a_chain_goes_from_its_end():
    clock, keys = Clock(), fresh_keys(6)
    with contextlib.closing(MemoryStore(budget=4, clock=clock)) as store:
        put(store, keys[:4], [b"x"] * 4)
        assert store.match(keys[:4]) == 4
        clock.now += 60.0
        put(store, keys[4:], [b"x"] * 2)
        assert store.which_stored(keys) == [True, True, False, False, True, True]
        assert store.oldest_age_s([1] * 4) == 60.0  # though two are too fresh to go
