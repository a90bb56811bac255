"""What a tier costs that hangs: one wait for each outage, whatever is asked."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore.errors import BadValue, StoreError
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import TellsRemovals, TellsRoom
from pdstore.store.tiers.hangs import ReadWatch
from pdstore.store.tiers.lower import Limits
from pdstore.store.wrappers import WrapperStore
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


class SearchHangs(MemoryStore):
    """Searches for unrelated keys hang until `answers` is set."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def which_stored(self, keys):
        self.answers.wait(10)
        return super().which_stored(keys)


def test_nothing_is_told_to_be_gone_that_a_tier_may_have_which_does_not_answer(open_tiers):
    first, below = MemoryStore(), SearchHangs()
    store, keys = open_tiers(first, below, limits=[Limits(look_s=0.2)]), fresh_keys(4)
    plant(first, keys[:1])
    plant(below, keys[1:3])
    tells = store.optional(TellsRemovals)
    assert tells.which_removed(keys[:1]) == [False]  # the tier need not be asked
    for why in ("no answer after 0.2 s", "is left out"):
        with pytest.raises(StoreError, match=why):
            tells.which_removed(keys)
    below.answers.set()
    eventually(lambda: store.match(keys) == 3, 5)
    assert tells.which_removed(keys) == [False, False, False, True]


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


class HangsAtReads(Faulty):
    """A disk whose directories are still read, and none of its files."""

    def __init__(self, store):
        super().__init__(store)
        self.num_begun = 0

    def match(self, keys):
        return self.wrapped.match(keys)

    def get(self, keys, slots):
        self.num_begun += 1
        return super().get(keys, slots)


def test_a_get_that_hangs_costs_one_load_an_outage_and_no_others(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = HangsAtReads(inner)
    store, keys = open_tiers(first, below), fresh_keys(6)
    plant(inner, keys)
    loads = []
    load = threading.Thread(target=lambda: loads.append(get(store, keys, [SIZE] * 6)))
    with held(below):
        load.start()
        eventually(lambda: store.optional(TellsRoom).room().problem is not None, 10)
        began_at = time.monotonic()
        for _ in range(100):
            assert store.match(keys) == 0
            assert get(store, keys, [SIZE] * 6) == []
        plant(store, fresh_keys(2))
        assert not store.flush(0.2), "its copies wait, too"
        assert time.monotonic() - began_at < 1.0
        assert below.num_begun == 2, "the load, and a probe beside the callers"
        assert load.is_alive()
    load.join(10)
    assert loads == [values_of(keys)]
    assert store.flush(10)
    assert store.match(keys) == 6


class HangsOnce(WrapperStore):
    """A server that answers every read but the first."""

    def __init__(self, store):
        super().__init__(store)
        self.is_first = True
        self.goes_on = threading.Event()

    def get(self, keys, slots):
        if self.is_first:
            self.is_first = False
            self.goes_on.wait(30)
        return super().get(keys, slots)


def test_a_tier_is_joined_again_by_a_probe_while_a_get_still_hangs(open_tiers):
    inner = MemoryStore()
    below = HangsOnce(inner)
    store, keys = open_tiers(MemoryStore(), below), fresh_keys(3)
    plant(inner, keys)
    load = threading.Thread(target=get, args=(store, keys, [SIZE] * 3))
    load.start()
    try:
        eventually(lambda: store.optional(TellsRoom).room().problem is not None, 10)
        eventually(lambda: get(store, keys, [SIZE] * 3) == values_of(keys), 5)
        assert load.is_alive()
        assert store.match(keys) == 3
    finally:
        below.goes_on.set()
        load.join(10)


def test_a_tier_that_reads_slowly_is_no_hung_tier():
    now, others = [100.0], []
    watch = ReadWatch(least_s=1.0, bytes_per_s=1000, clock=lambda: now[0])
    with watch.reading(3000, lambda: others.append("probe")):
        now[0] += 3.9
        assert not watch.is_hung(), "so many bytes may take so long"
        with watch.reading(1000, lambda: others.append("probe")):
            now[0] += 0.9
        assert not watch.is_hung(), "another read was answered"
        now[0] += 3.9
        assert not watch.is_hung()
        now[0] += 0.2
        assert watch.is_hung()
        eventually(lambda: others == ["probe"], 5)
        eventually(lambda: not watch.is_hung(), 5)
    now[0] += 1000
    assert not watch.is_hung(), "nothing is under way"


def test_a_read_that_fails_is_no_answer():
    now, answers = [100.0], threading.Event()
    watch = ReadWatch(least_s=1.0, clock=lambda: now[0])
    with watch.reading(1, answers.wait):
        now[0] += 2.0
        with pytest.raises(StoreError), watch.reading(1, answers.wait):
            raise StoreError("no")
        assert watch.is_hung()
        with pytest.raises(BadValue), watch.reading(1, answers.wait):
            raise BadValue("a wrong value is an answer")
        assert not watch.is_hung()
        answers.set()


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
