"""Optional protocols: every store that offers one keeps its promises."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pdstore.errors import StoreClosed, StoreFull
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.store import Slots, open_store
from pdstore.store.base import FRESH_S
from pdstore.store.guard import GuardedStore
from pdstore.store.optional import EvictsByUse, FindsKeys
from pdstore.testing import fresh_keys
from pdstore.testing.values import put as put_values

SETTINGS = read_settings()
KEYS = [BlockKey(f"pds1:{'0' * 32}:handoff:{i:032x}:0:done") for i in range(40)]


@pytest.fixture(params=["memory", "file", "redis"])
def url(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("redis_url")
    return "memory://optional" if request.param == "memory" else f"file://{tmp_path}/pool"


@pytest.fixture
def store(url, closed_after):
    store = closed_after(open_store(url, SETTINGS))
    store.remove(KEYS)
    return store


def put(store, keys):
    slots = Slots(memoryview(bytearray(64)), 64, [0] * len(keys), [64] * len(keys))
    assert store.put(keys, slots) == len(keys)


def test_stored_keys_are_found_among_others_in_any_order(store):
    finder = store.optional(FindsKeys)
    assert finder.which_stored(KEYS) == [False] * 40
    put(store, KEYS[3::7])
    assert finder.which_stored(KEYS) == [i % 7 == 3 for i in range(40)]
    assert finder.which_stored([]) == []


def test_a_search_takes_only_keys_of_the_contract(store):
    with pytest.raises(ValueError, match="distinct"):
        store.optional(FindsKeys).which_stored([KEYS[0], KEYS[0]])


def test_a_closed_store_finds_nothing(store):
    store.close()
    with pytest.raises(StoreClosed):
        store.optional(FindsKeys).which_stored(KEYS)


def test_the_wrappers_of_an_engine_let_a_search_through(store):
    wrapped = GuardedStore(store, Metrics())
    put(store, KEYS[:1])
    assert wrapped.optional(FindsKeys).which_stored(KEYS[:2]) == [True, False]


@pytest.fixture
def files(tmp_path, closed_after):
    return [closed_after(open_store(f"file://{tmp_path}/pool", SETTINGS)) for _ in range(2)]


def test_files_wake_who_waits_within_milliseconds(files):
    writer, listener = files
    delays = []
    for key in KEYS:
        seen, woken = listener.wait_for_change(None, 0.0), []
        thread = threading.Thread(
            target=lambda seen=seen, woken=woken: (
                listener.wait_for_change(seen, 10.0),
                woken.append(time.monotonic()),
            )
        )
        thread.start()
        put(writer, [key])
        stored = time.monotonic()
        thread.join(20)
        delays.append(woken[0] - stored)
    assert sorted(delays)[len(delays) // 2] < 0.010


def test_a_closed_store_tells_nothing(files):
    files[0].close()
    with pytest.raises(StoreClosed):
        files[0].wait_for_change(None, 0.0)


@pytest.mark.parametrize("size", [40 << 10, 64 << 10])  # one such value takes a slab of its own
def test_an_arena_that_could_not_hold_new_values_evicts_none(size, tmp_path):
    url = f"shm://slots?dir={tmp_path}&size=1MiB&slab=64KiB&lease=60"
    with contextlib.closing(open_store(url, SETTINGS)) as store:
        by_use = store.optional(EvictsByUse)
        put(store, [POOL_ID_KEY])  # holds one slab of the 16
        small = fresh_keys(60)
        put_values(store, small, [bytes(4 << 10)] * len(small))
        assert store.match(small) == len(small)
        assert not by_use.make_room(fresh_keys(16), [size] * 16)
        assert store.match(small) == len(small), "none went in vain"
        assert by_use.make_room(fresh_keys(15), [size] * 15)
        assert store.match([POOL_ID_KEY]) == 1


def test_room_in_an_arena_is_never_made_of_markers(tmp_path):
    url = f"shm://markers?dir={tmp_path}&size=1MiB&slab=64KiB&lease=60"
    with contextlib.closing(open_store(url, SETTINGS)) as store:
        by_use, blocks = store.optional(EvictsByUse), fresh_keys(40)
        marker = BlockKey(f"{blocks[0].rsplit(':', 3)[0]}:handoff:{'b' * 32}:0:done")
        put(store, [marker])
        with contextlib.suppress(StoreFull):
            for key in blocks:
                put_values(store, [key], [bytes(64 << 10)])
        deadline = time.monotonic() + 20
        while age_of(store, marker) < 1.2:  # after a second a marker is not fresh any more
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for key in blocks:
            store.match([key])
        assert by_use.make_room(fresh_keys(15), [64 << 10] * 15)
        assert not by_use.make_room(fresh_keys(16), [64 << 10] * 16)
        assert store.which_stored([marker]) == [True]


def age_of(store, key):
    return next(value.age_s for value in store.stored_values(key) if value.key == key)


SMALL = pytest.mark.parametrize(
    "kind", ["memory://?budget", "file://{}/pool?budget", "shm://room?dir={}&size"]
)


@SMALL
def test_a_use_begins_no_lease_and_ends_none(kind, tmp_path):
    size, stored = 64 << 10, []
    url = f"{kind.format(tmp_path)}={24 * size}{'&slab=64KiB' * kind.startswith('shm')}"
    with contextlib.closing(open_store(url, SETTINGS)) as store:
        with contextlib.suppress(StoreFull):
            for key in fresh_keys(40):
                put_values(store, [key], [bytes(size)])
                stored.append(key)
        assert store.match(stored[:4]) == 4
        store.optional(EvictsByUse).use(stored)
        time.sleep(FRESH_S + 0.1)
        new = fresh_keys(12)
        assert put_values(store, new, [bytes(size)] * 12) == 12
        assert store.which_stored([*stored[:4], *new]) == [True] * 16


@SMALL
def test_room_is_made_of_leased_values_that_were_used_longest_ago(kind, tmp_path):
    size, new, stored = 64 << 10, fresh_keys(3), []
    url = f"{kind.format(tmp_path)}={24 * size}{'&slab=64KiB' * kind.startswith('shm')}"
    with contextlib.closing(GuardedStore(open_store(url, SETTINGS), Metrics())) as store:
        by_use = store.optional(EvictsByUse)
        put(store, KEYS[:1])
        with contextlib.suppress(StoreFull):
            for key in fresh_keys(40):
                put_values(store, [key], [bytes(size)])
                stored.append(key)
        assert not by_use.make_room(fresh_keys(30), [size] * 30)
        assert sum(store.match([key]) for key in stored) == len(stored), "none went in vain"
        assert by_use.make_room([*new, stored[0]], [size] * 4)
        assert put_values(store, new, [bytes(size)] * 3) == 3
        there = [store.match([key]) for key in [*KEYS[:1], stored[0], *stored[4:], *new]]
        assert there == [1] * (len(stored) + 1)
