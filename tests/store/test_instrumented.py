"""A guarded store counts calls by outcome, their seconds and bytes."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreTimeout
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.wrappers import GuardedStore
from tests.support.kv import settings_of
from tests.support.scripted_store import Scripted

KEYS = [BlockKey("a")]


def test_calls_seconds_and_bytes_are_counted():
    metrics = Metrics()
    assert metrics.total() == 0
    store = GuardedStore(open_store("memory://", settings_of()), metrics)
    slots = Slots(memoryview(bytearray(b"abcd")), 4, [0], [4])
    store.put(KEYS, slots)
    store.match(KEYS)
    store.get(KEYS, slots)
    store.get([BlockKey("missing")], slots)
    store.clear("0" * 32)
    value = metrics.registry.get_sample_value
    assert value("pdstore_bytes_total", {"direction": "save"}) == 4
    assert value("pdstore_bytes_total", {"direction": "load"}) == 4
    assert value("pdstore_store_calls_total", {"verb": "get", "outcome": "ok"}) == 2
    assert value("pdstore_store_seconds_count", {"verb": "put"}) == 1
    assert value("pdstore_store_calls_total", {"verb": "clear", "outcome": "ok"}) == 1


def test_a_failed_call_is_counted_by_its_error():
    metrics = Metrics()
    store = GuardedStore(Scripted(StoreTimeout("slow")), metrics)
    with pytest.raises(StoreTimeout):
        store.match(KEYS)
    labels = {"verb": "match", "outcome": "StoreTimeout"}
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", labels) == 1
