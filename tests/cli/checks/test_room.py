"""Checks of a store's room."""

from __future__ import annotations

import pytest

from pdstore.cli.checks.finding import Level
from pdstore.cli.checks.room import check_room
from pdstore.errors import StoreUnavailable
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import Room

GIB = 1 << 30


class Telling(MemoryStore):
    def __init__(self, room):
        super().__init__()
        self._room = room

    def room(self):
        if self._room is None:
            raise StoreUnavailable("away")
        return self._room


def found(room, kv_bytes=None):
    return {f.subject: f for f in check_room(Telling(room), kv_bytes)}


@pytest.mark.parametrize(
    ("capacity", "kv_bytes", "level"),
    [
        (1536 << 10, None, Level.BAD),
        (20 * GIB, None, Level.OK),
        (20 * GIB, 16 << 20, Level.BAD),
        (None, None, Level.WARN),
    ],
)
def test_a_pool_must_hold_a_prompt(capacity, kv_bytes, level):
    room = found(Room("redis 7", 100, capacity, 0, "noeviction"), kv_bytes)["room"]
    assert room.level is level
    assert bool(room.remedy) is (level is not Level.OK)


def test_a_policy_that_evicts_the_pools_id_is_yellow():
    finding = found(Room("redis 7", 100, GIB, 3, "allkeys-lru"))["eviction"]
    assert finding.level is Level.WARN
    assert "volatile-lru" in finding.remedy
    assert "eviction" not in found(Room("redis 7", 100, GIB, 3, "volatile-lru"))


def test_room_that_nobody_tells_is_no_fault():
    assert found(None)["room"].level is Level.INFO


@pytest.mark.parametrize(
    ("num_connections", "level"), [(3, Level.WARN), (5000, None), (None, None)]
)
def test_a_server_that_takes_few_connections_is_yellow(num_connections, level):
    room = Room("redis 7", 0, 20 * GIB, 0, "noeviction", num_connections)
    finding = found(room).get("connections")
    assert (finding and finding.level) is level
    if finding:
        assert "maxclients" in finding.remedy
