"""Checks of a store: a right one is measured, a wrong one told at its step; its room."""

from __future__ import annotations

import pytest

from pdstore.cli.answer import Level
from pdstore.cli.doctor import check_room, measure, try_store
from pdstore.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import Room
from pdstore.testing import fresh_keys
from pdstore.testing.values import put

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


@pytest.mark.misconfiguration("redis with `noeviction` is full")
def test_a_server_that_refuses_when_full_is_told_with_the_policy_that_evicts():
    shown = found(Room("redis 7", 100, GIB, 0, "noeviction"))["when full"]
    assert shown.level is Level.INFO
    assert "saves are refused" in shown.said
    assert "set maxmemory-policy volatile-lru" in shown.remedy
    for capacity, policy in ((GIB, "volatile-lru"), (None, "noeviction")):
        assert "when full" not in found(Room("redis 7", 100, capacity, 0, policy))


@pytest.mark.misconfiguration("redis evicts by another rule than `volatile-lru`")
@pytest.mark.parametrize(
    ("policy", "is_right"),
    [
        *((right, True) for right in ("volatile-lru", "noeviction", "least used")),
        ("allkeys-lru", False),
        *(
            (f"{who}-{what}", False)
            for who in ("volatile", "allkeys")
            for what in ("lfu", "random")
        ),
        ("volatile-ttl", False),
        ("volatile-lru, volatile-ttl", False),
    ],
)
def test_a_policy_that_loses_hand_offs_is_yellow_with_the_one_that_does_not(policy, is_right):
    finding = found(Room("redis 7", 100, GIB, 3, policy)).get("eviction")
    assert (finding is None) is is_right
    if finding:
        assert (finding.level, finding.remedy) == (Level.WARN, "set maxmemory-policy volatile-lru")
        assert ("evicts the pool's id" in finding.said) is (policy == "allkeys-lru")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (StoreDenied("x"), "user and password"),
        (StoreFull("x"), "more memory"),
        (StoreTimeout("x"), "slow or hangs, or whether a firewall"),
        (StoreUnavailable("x"), "the server runs"),
        (StoreError("x"), "own words"),
        (StoreError("x", remedy="its own remedy"), "its own remedy"),
    ],
)
def test_the_remedy_of_a_failure_follows_the_errors_class(cause, words):
    class Failing(MemoryStore):
        def put(self, keys, slots):
            raise cause

    remedy = try_store(read_settings(), Failing()).remedy
    assert words in remedy
    assert isinstance(cause, StoreDenied) or "password" not in remedy


def test_values_that_are_lost_at_once_are_not_called_a_wrong_password():
    remedy = try_store(read_settings(), Wrong("load")).remedy
    assert "two servers behind one address" in remedy


@pytest.mark.misconfiguration("redis' `maxclients` is reached")
@pytest.mark.parametrize(
    ("num_connections", "level"), [(3, Level.WARN), (5000, None), (None, None)]
)
def test_a_server_that_takes_few_connections_is_yellow(num_connections, level):
    room = Room("redis 7", 0, 20 * GIB, 0, "noeviction", num_connections)
    finding = found(room).get("connections")
    assert (finding and finding.level) is level
    if finding:
        assert "maxclients" in finding.remedy


def test_a_right_store_is_measured_and_left_as_it_was(url, closed_after):
    settings = read_settings()
    store = closed_after(open_store(url, settings))
    before = {value.key for value in store.stored_values()}
    assert try_store(settings, store).level is Level.OK
    finding = measure(settings, store, None)
    assert (finding.level, finding.subject) == (Level.OK, "speed")
    assert "every byte is right" in finding.said
    assert {value.key for value in store.stored_values()} == before


class Wrong(MemoryStore):
    """Does one thing wrongly."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def match(self, keys):
        return 1 if self.step == "connect" else super().match(keys)

    def get(self, keys, slots):
        return 0 if self.step == "load" else super().get(keys, slots)

    def remove(self, keys):
        if self.step != "remove":
            super().remove(keys)


@pytest.mark.parametrize("step", ["connect", "load", "remove"])
def test_a_wrong_store_is_told_at_its_step(step):
    finding = try_store(read_settings(), Wrong(step))
    assert (finding.level, finding.subject) == (Level.BAD, step)


@pytest.mark.parametrize("mib", [8, 48])
def test_a_full_small_pool_keeps_its_values(tmp_path, mib):
    store = open_store(f"file://{tmp_path}/pool?budget={mib}MiB&lease=0.001", read_settings())
    keys = fresh_keys(mib - 2)
    assert put(store, keys, [bytes(1 << 20)] * len(keys)) == len(keys)
    assert "push others' values out" in measure(read_settings(), store, None).said
    assert store.match(keys) == len(keys)
    store.close()
