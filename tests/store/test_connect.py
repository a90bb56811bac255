"""connect_store: the store of an engine, there or not; the pool's id, made once and healed."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from pdstore import Metrics, read_settings
from pdstore.errors import ConfigError, StoreTimeout, StoreUnavailable
from pdstore.format import block
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import POOL_ID_KEY, BlockKey, Namespace, Part
from pdstore.store.base import Slots
from pdstore.store.connect import connect_store, read_marker, read_pool_id
from pdstore.store.memory import MemoryStore
from tests.support.kv import eventually

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
NOWHERE = "redis+unix:///nowhere/redis.sock"


def test_a_store_that_is_away_is_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    settings = read_settings(store=NOWHERE)
    with contextlib.closing(connect_store(settings, Metrics())):
        assert "serving without the pool until it appears" in caplog.text


def test_both_halves_of_an_instance_warn_once_of_a_store_that_is_away(caplog):
    settings = read_settings(store=NOWHERE)
    for _ in range(2):
        connect_store(settings, Metrics()).close()
    connect_store(read_settings(store="redis+unix:///elsewhere/redis.sock"), Metrics()).close()
    lines = [r.getMessage() for r in caplog.records if "serving without" in r.getMessage()]
    assert ["nowhere" in line for line in lines] == [True, False]


def test_a_required_store_that_is_away_is_an_error():
    with pytest.raises(StoreUnavailable):
        connect_store(read_settings(store=NOWHERE, require_store=True), Metrics())


@pytest.mark.redis
def test_a_required_store_that_hangs_is_an_error_and_leaves_no_thread(redis_server):
    server, before = redis_server(), set(threading.enumerate())
    server.pause()
    with pytest.raises(StoreTimeout):
        connect_store(
            read_settings(store=f"{server.url}?timeout=0.5", require_store=True), Metrics()
        )
    server.resume()
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_store_that_cannot_be_sealed_is_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(MemoryStore, "close", lambda store: closed.append(store))
    with pytest.raises(ConfigError, match="cannot read"):
        connect_store(read_settings(store="memory://", seal_key_file=tmp_path / "no"), Metrics())
    assert len(closed) == 1


def test_a_pools_id_is_made_once_and_every_door_reads_the_same():
    store = MemoryStore()
    first = read_pool_id(store)
    assert len(first) == 16
    assert read_pool_id(store) == first
    assert read_pool_id(MemoryStore()) != first


@pytest.mark.parametrize("length", [64, 10])
def test_a_damaged_id_is_replaced(length):
    store = MemoryStore()
    store.put([POOL_ID_KEY], Slots(memoryview(bytearray(64)), 64, [0], [length]))
    assert read_pool_id(store) == read_pool_id(store)


def test_a_marker_is_read_where_it_is_whole():
    store, header = MemoryStore(), HandoffId("ab" * 16).marker(NAMESPACE, 0, 1, 200)
    key, damaged, short = BlockKey("started"), BlockKey("damaged"), BlockKey("short")
    value = memoryview(bytearray(64))
    store.put([damaged, short], Slots(value, 64, [0, 0], [64, 10]))
    block.seal(value, header)
    store.put([key], Slots(value, 64, [0], [64]))
    assert read_marker(store, key) == header
    assert read_marker(store, damaged) is None
    assert read_marker(store, short) is None
    assert read_marker(store, BlockKey("absent")) is None
