"""RoomWatch: how full a store is becomes metrics, and a store that errs changes nothing."""

from __future__ import annotations

import time

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.store.connect import RoomWatch
from pdstore.store.optional import Room
from tests.support.kv import eventually
from tests.support.scripted_store import Scripted


class Telling(Scripted):
    """A store that tells these rooms one after the other, and errs at the end."""

    def __init__(self, *rooms):
        super().__init__()
        self.rooms = list(rooms)

    def room(self):
        if not self.rooms:
            raise StoreUnavailable("gone")
        return self.rooms.pop(0)


@pytest.fixture
def watch(closed_after):
    return lambda store, metrics: closed_after(RoomWatch(store, metrics, interval_s=0.001))


def shown(metrics, name):
    return metrics.registry.get_sample_value(f"pdstore_store_{name}")


def test_evictions_count_from_the_first_look_on_and_errors_keep_the_last_numbers(watch):
    metrics = Metrics()
    store = Telling(Room("k", 5, 10, 100, "lru"), Room("k", 7, 10, 103, "lru"))
    watch(store, metrics)
    eventually(lambda: not store.rooms)
    eventually(lambda: shown(metrics, "evictions_total") == 3)
    assert (shown(metrics, "used_bytes"), shown(metrics, "capacity_bytes")) == (7, 10)


def test_what_a_store_does_not_tell_is_zero(watch):
    metrics = Metrics()
    watch(Telling(Room("k", None, None, None, "")), metrics)
    watch(Scripted(), metrics)
    assert shown(metrics, "capacity_bytes") == 0


def test_a_store_that_reads_its_keys_for_long_is_left_alone_for_longer(watch):
    class Slow(Telling):
        def room(self):
            time.sleep(0.02)
            return super().room()

    store = Slow(*[Room("k", 5, 10, 100, "lru")] * 20)
    watch(store, Metrics())
    eventually(lambda: len(store.rooms) < 20)
    time.sleep(0.3)  # with a pause of its interval the store would be asked 14 times
    assert len(store.rooms) == 19
