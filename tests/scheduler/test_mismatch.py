"""Mismatches: one id for all who use a pool, no false alarm, and no flood of warnings."""

from __future__ import annotations

import pytest

from pdstore.format.keys import POOL_ID_KEY
from pdstore.scheduler.mismatch import MismatchLog, PoolIdentity
from pdstore.store.base import Slots
from pdstore.store.connect import read_pool_id
from pdstore.store.memory import MemoryStore
from pdstore.testing.faulty import Faulty

OTHER = "ab" * 16


@pytest.fixture
def store():
    return MemoryStore()


def test_the_store_is_asked_again_only_after_its_time(store):
    lasting, fleeting = PoolIdentity(store, age_s=60.0), PoolIdentity(store, age_s=0.0)
    for identity in (lasting, fleeting):
        identity.refresh()
    before = lasting.current
    store.remove([POOL_ID_KEY])
    assert lasting.refresh() > 0
    fleeting.refresh()
    assert lasting.current == before
    assert fleeting.current == read_pool_id(store) != before


def test_the_id_before_a_store_came_back_empty_counts_for_a_while(store):
    identity = PoolIdentity(store, age_s=60.0)
    identity.refresh()
    before = identity.current.hex()
    store.remove([POOL_ID_KEY])
    assert identity.is_same(read_pool_id(store).hex())
    assert identity.is_same(before)


def test_an_id_between_two_losses_that_was_never_seen_here_is_no_other_pool(store):
    """P looked between them, and looks again within `age_s`: D would compute until then."""
    d, p = PoolIdentity(store, age_s=60.0), PoolIdentity(store, age_s=60.0)
    d.refresh()
    store.remove([POOL_ID_KEY])
    p.refresh()
    store.remove([POOL_ID_KEY])
    assert d.is_same(p.current.hex())
    assert p.current != read_pool_id(store)


def test_in_the_end_the_former_id_is_another_pool(store):
    identity = PoolIdentity(store, age_s=0.0)
    identity.refresh()
    before = identity.current.hex()
    store.remove([POOL_ID_KEY])
    identity.refresh()
    assert not identity.is_same(before)


def test_a_store_that_errs_leaves_the_id_as_it_is_and_says_no_to_none(store):
    """P may have seen a pool that was replaced, where D cannot look now."""
    faulty = Faulty(store)
    identity = PoolIdentity(faulty, age_s=0.0)
    identity.refresh()
    before = identity.current
    faulty.error_rate = 1.0
    identity.refresh()
    assert identity.current == before
    assert identity.is_same(OTHER)
    faulty.error_rate = 0.0
    assert not identity.is_same(OTHER)


def test_a_pool_has_one_id_for_all_and_heals_a_damaged_one(store):
    first = read_pool_id(store)
    assert read_pool_id(store) == first
    store.remove([POOL_ID_KEY])
    store.put([POOL_ID_KEY], Slots(memoryview(bytearray(64)), 64, [0], [64]))
    healed = read_pool_id(store)
    assert healed != bytes(16)
    assert read_pool_id(store) == healed
    assert read_pool_id(MemoryStore()) != first


def test_messages_are_forgotten_in_the_end(caplog):
    mismatches = MismatchLog(silence_s=60.0, pause_s=0.0)
    for i in range(65):
        mismatches.warn(f"message {i}")
    mismatches.warn("message 0")
    assert caplog.text.count("message 0\n") == 2
