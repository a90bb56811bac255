"""What a tier costs that hangs: one wait for each outage, whatever is asked."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import StoreError
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import TellsRoom
from pdstore.store.tiers.lower import Limits
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import get, put
from tests.store.tiers.conftest import held
from tests.support.kv import eventually

SIZE = 4096


def plant(store, keys):
    put(store, keys, values_of(keys))


def values_of(keys):
    return [content(key, SIZE) for key in keys]


def test_a_hung_tier_costs_one_look_an_outage_and_is_joined_again(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store, keys = open_tiers(first, below, limits=[Limits(look_s=0.2)]), fresh_keys(4)
    plant(first, keys[:2])
    plant(inner, keys[2:])
    assert store.match(keys) == 4
    with held(below):
        began_at = time.monotonic()
        assert store.match(keys) == 2
        assert time.monotonic() - began_at >= 0.19
        began_at = time.monotonic()
        for _ in range(200):
            assert store.match(keys) == 2
            assert get(store, keys, [SIZE] * 4) == values_of(keys[:2])
        store.remove(keys[3:])
        with pytest.raises(StoreError, match="not this one"):
            store.clear("f" * 32)
        assert time.monotonic() - began_at < 0.2 * 50, "the others do not wait"
        assert store.optional(TellsRoom).room().problem is not None
    eventually(lambda: store.match(keys) == 4, 5)
    assert store.optional(TellsRoom).room().problem is None


def test_removals_wait_once_while_a_tier_hangs(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store, keys = open_tiers(first, below, limits=[Limits(look_s=0.2)]), fresh_keys(4)
    with held(below):
        plant(store, keys)
        time.sleep(0.05)  # its copy hangs
        began_at = time.monotonic()
        for key in keys[:3]:
            store.remove([key])
        assert time.monotonic() - began_at < 3.0, "one search is waited for"
        with pytest.raises(StoreError, match="not this one"):
            store.clear("f" * 32)
        assert first.which_stored(keys) == [False, False, False, True]
    assert store.flush(10)
    eventually(lambda: inner.which_stored(keys) == [False, False, False, True], 5)


def test_clear_waits_for_a_tier_that_is_only_slow(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store, keys = open_tiers(first, below, limits=[Limits(look_s=0.01)]), fresh_keys(4)
    plant(inner, keys)
    threading.Timer(0.5, below.release).start()
    below.hold()
    assert store.match(keys) == 0, "the tier is out"
    store.clear(keys[0].split(":")[1])
    assert inner.match(keys) == 0


class HangsAtChanges(Faulty):
    """A disk that takes no writes, and whose directories are still read."""

    def match(self, keys):
        return self.wrapped.match(keys)


def test_removals_cost_little_while_a_tier_hangs_that_can_be_searched(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = HangsAtChanges(inner)
    store, keys = open_tiers(first, below), fresh_keys(4)
    with held(below):
        plant(store, keys)
        time.sleep(0.05)  # its copy hangs
        began_at = time.monotonic()
        for key in keys[:3]:
            store.remove([key])
        assert time.monotonic() - began_at < 5.0, "one copy and one removal are waited for"
        assert first.which_stored(keys) == [False, False, False, True]
        assert "a call takes too long" in store.optional(TellsRoom).room().problem
    eventually(lambda: inner.which_stored(keys) == [False, False, False, True], 10)


@pytest.mark.redis
def test_a_suspended_redis_below_costs_one_look_and_is_joined_again(open_tiers, redis_server):
    server = redis_server()
    first, below = MemoryStore(), open_store(server.url, Settings())
    store, keys = open_tiers(first, below), fresh_keys(4)
    plant(first, keys[:2])
    plant(below, keys[2:])
    assert store.match(keys) == 4
    server.pause()
    waits = []
    for _ in range(100):
        began_at = time.monotonic()
        assert store.match(keys) == 2
        waits.append(time.monotonic() - began_at)
    assert waits[0] > 0.09
    assert sum(waits[1:]) < 1, "one look waits for a budget, the others do not wait"
    server.resume()
    eventually(lambda: store.match(keys) == 4, 20)
