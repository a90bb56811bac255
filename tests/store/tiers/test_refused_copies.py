"""What the admission decides about saves and copies down, by which tier's age."""

from __future__ import annotations

import time

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import EvictsByUse, TakesAdmission
from pdstore.store.seal import seal_store
from pdstore.store.tiers import copies
from pdstore.store.tiers.lower import Limits
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import put
from tests.store.tiers.conftest import copies_of, held
from tests.store.tiers.test_promotion import Rule
from tests.support.clock import Clock
from tests.support.kv import eventually, settings_of
from tests.support.seal_key import write_seal_key

SIZE = 4096


def put_all(store, keys):
    assert put(store, keys, [content(key, SIZE) for key in keys]) == len(keys)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def full(clock):
    """A tier with room for four values, and its four, which are 30 s old."""
    store, keys = MemoryStore(budget=4 * SIZE, lease_s=1.0, clock=clock), fresh_keys(4)
    put_all(store, keys)
    clock.now += 30
    return store, keys


def use(store, admission):
    store.optional(TakesAdmission).use_admission(admission)
    return admission


def test_a_refused_put_stays_above_and_the_tier_below_keeps_what_it_has(open_tiers, full):
    (below, old), first, keys = full, MemoryStore(), fresh_keys(3)
    store = open_tiers(first, below)
    rule = use(store, Rule(False))
    put_all(store, keys)
    assert store.flush()
    assert (first.match(keys), below.match(keys), below.match(old)) == (3, 0, 4)
    assert rule.ages == [30.0]
    assert copies_of(store) == {"not_admitted": 3}


def test_a_put_is_admitted_or_refused_as_a_whole(open_tiers, full, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_BYTES", SIZE)
    below, _ = full
    store = open_tiers(MemoryStore(), below)
    rule = use(store, Rule(True))
    refused, admitted = fresh_keys(3), fresh_keys(3)
    put_all(store, admitted)
    assert store.flush()
    assert (len(rule.ages), copies_of(store)) == (1, {"copied": 3})
    rule.answer = False
    put_all(store, refused)
    assert store.flush()
    assert (len(rule.ages), copies_of(store)) == (2, {"copied": 3, "not_admitted": 3})


def test_what_has_room_below_or_is_there_already_needs_no_admission(open_tiers, full, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_BYTES", SIZE)
    below, old = full
    store = open_tiers(MemoryStore(), below)
    rule = use(store, Rule(False))
    put_all(store, old)
    assert store.flush()
    below.remove(old[2:])
    new = fresh_keys(2)
    put_all(store, new)
    assert store.flush()
    assert below.match(new) == 2
    assert (rule.ages, copies_of(store)) == ([], {"copied": 2})


def test_a_new_block_behind_those_that_are_below_is_asked_about(open_tiers, full, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_BYTES", SIZE)
    below, old = full
    store = open_tiers(MemoryStore(), below)
    rule = use(store, Rule(True))
    put_all(store, fresh_keys(1))
    assert store.flush()
    rule.answer = False
    put_all(store, [*old[1:], *fresh_keys(2)])
    assert store.flush()
    assert copies_of(store) == {"copied": 1, "not_admitted": 2}


def test_without_an_admission_all_goes_down(open_tiers, full):
    (below, _), keys = full, fresh_keys(3)
    store = open_tiers(MemoryStore(), below)
    put_all(store, keys)
    assert store.flush()
    assert below.match(keys) == 3


class Plain(WrapperStore):
    """A store of a plug-in that offers nothing beyond the contract."""


def test_a_save_is_judged_by_the_age_of_the_last_tier(open_tiers, full):
    below, _ = full
    for middle in ([], [MemoryStore(budget=SIZE)]):
        for first in (MemoryStore(), MemoryStore(budget=SIZE), Plain(MemoryStore())):
            by_use = open_tiers(first, *middle, below).optional(EvictsByUse)
            assert by_use.oldest_age_s([SIZE]) == 30.0
    by_use = open_tiers(below, MemoryStore()).optional(EvictsByUse)
    assert by_use.oldest_age_s([SIZE]) is None, "it has room"
    by_use = open_tiers(below, Plain(MemoryStore())).optional(EvictsByUse)
    assert by_use.oldest_age_s([SIZE]) is None, "it tells no age"
    assert open_tiers(Plain(MemoryStore()), Plain(below)).optional(EvictsByUse) is None


def test_room_is_made_in_the_first_tier_alone(open_tiers, clock):
    first, below = (MemoryStore(budget=2 * SIZE, lease_s=600, clock=clock) for _ in range(2))
    keys, new = fresh_keys(2), fresh_keys(2)
    put_all(first, keys)
    put_all(below, keys)
    by_use = open_tiers(first, below).optional(EvictsByUse)
    assert by_use.make_room(new, [SIZE] * 2)
    assert (first.match(keys), below.match(keys)) == (0, 2)
    by_use = open_tiers(Plain(first), below).optional(EvictsByUse)
    put_all(first, keys)
    assert not by_use.make_room(new, [SIZE] * 2)
    by_use.use(keys)
    assert (first.match(keys), below.match(keys)) == (2, 2)


class HangsWhenAsked(Faulty):
    """A tier that is searched at once, and whose ages are not told."""

    def oldest_age_s(self, sizes):
        self._open.wait(60)
        return 1.0

    def make_room(self, keys, sizes):
        return False

    def use(self, keys):
        pass


def test_the_age_of_a_tier_that_hangs_or_fails_is_waited_for_once(open_tiers):
    below = HangsWhenAsked(MemoryStore())
    by_use = open_tiers(MemoryStore(), below, limits=[Limits(look_s=0.2)]).optional(EvictsByUse)
    assert by_use.oldest_age_s([SIZE]) == 1.0
    with held(below):
        began_at = time.monotonic()
        for _ in range(50):
            assert by_use.oldest_age_s([SIZE]) is None
        assert 0.19 < time.monotonic() - began_at < 5.0
    eventually(lambda: by_use.oldest_age_s([SIZE]) == 1.0, 10)


class NotesUses(HangsWhenAsked):
    """A tier that notes of which keys uses are counted."""

    def __init__(self, store):
        super().__init__(store)
        self.used = []

    def use(self, keys):
        self.used.append(keys)


def test_uses_wait_for_a_tier_that_hangs_with_a_bounded_number_of_keys(open_tiers, monkeypatch):
    monkeypatch.setattr(copies, "MOST_USED", 8)
    inner, keys = MemoryStore(), fresh_keys(6)
    put_all(inner, keys)
    below = NotesUses(inner)
    store = open_tiers(MemoryStore(), below, limits=[Limits(look_s=0.02)])
    with held(below):
        assert store.match(keys) == 0
        for end in (2, 3, 4, 1):
            store.optional(EvictsByUse).use(keys[:end])
    eventually(lambda: len(below.used) == 3, 10)
    assert below.used == [keys[:3], keys[:4], keys[:1]]


class FailsWhenAsked(HangsWhenAsked):
    def oldest_age_s(self, sizes):
        raise StoreUnavailable("not now")


def test_a_tier_that_fails_to_tell_its_age_takes_copies(open_tiers):
    below, keys = FailsWhenAsked(MemoryStore()), fresh_keys(2)
    store = open_tiers(MemoryStore(), below)
    use(store, Rule(False))
    put_all(store, keys)
    assert store.flush()
    assert below.match(keys) == 2


def test_an_admission_reaches_tiers_through_every_wrapper(open_tiers, full, tmp_path):
    below, _ = full
    settings = settings_of(seal_key_file=write_seal_key(tmp_path / "seal.key"))
    tiers = open_tiers(MemoryStore(), below)
    rule = use(seal_store(tiers, settings), Rule(False))
    put_all(tiers, fresh_keys(1))
    assert tiers.flush()
    assert (len(rule.ages), copies_of(tiers)) == (1, {"not_admitted": 1})


def test_while_copies_lag_behind_evictions_the_first_tiers_age_decides_of_saves(
    open_tiers, full, clock
):
    above, _ = full
    store = open_tiers(above, MemoryStore(), limits=[Limits(copy_bytes_per_s=SIZE // 10)])
    tells = store.optional(EvictsByUse)
    assert tells.oldest_age_s([SIZE]) is None, "below is room"
    for _ in range(2):  # the first of them is tried at once, and is lost
        store.copy_down(fresh_keys(4), [SIZE] * 4)
    eventually(lambda: store.lower[0].copier.delay_s == pytest.approx(40, abs=0.1))
    assert tells.oldest_age_s([SIZE]) == 30.0
    clock.now += 20
    assert tells.oldest_age_s([SIZE]) is None, "they are copied before they are evicted"
