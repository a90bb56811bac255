"""What goes up after a get that found it below, and what does not."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pdstore.errors import StoreFull
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import Promotes, TakesAdmission, TellsTiers
from pdstore.store.seal import seal_store
from pdstore.store.tiers import purges
from pdstore.store.tiers.found import Whereabouts
from pdstore.store.tiers.lower import Limits
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import empty_slots, get, put
from tests.store.tiers.conftest import copies_of
from tests.support.clock import Clock
from tests.support.kv import eventually
from tests.support.seal_key import write_seal_key

SIZE = 4096


class Rule:
    """An admission with one answer, which notes the ages that it is asked about."""

    def __init__(self, answer):
        self.answer = answer
        self.ages = []

    def admits(self, oldest_s):
        self.ages.append(oldest_s)
        return self.answer


def values_of(keys):
    return [content(key, SIZE) for key in keys]


def plant(store, keys):
    assert put(store, keys, values_of(keys)) == len(keys)


def load(store, keys):
    """Gets values and promotes what lay below, from the same memory, as a load does."""
    slots = empty_slots([SIZE] * len(keys))
    assert store.get(keys, slots) == len(keys)
    assert [bytes(slots.value(i)) for i in range(len(keys))] == values_of(keys)
    with contextlib.suppress(StoreFull):
        store.optional(Promotes).promote(keys, slots)


@pytest.fixture(params=["memory", "file", "shm", pytest.param("redis", marks=pytest.mark.redis)])
def first(request, tmp_path, name, closed_after):
    """A first tier of each kind."""
    if request.param == "file":
        return closed_after(FileStore(tmp_path / "first"))
    if request.param == "shm":
        return closed_after(request.getfixturevalue("arena_of")())
    if request.param == "redis":
        return closed_after(open_store(request.getfixturevalue("redis_url"), Settings()))
    return closed_after(MemoryStore(f"memory://{name}"))


def test_what_was_found_below_goes_up_and_nothing_else(open_tiers, first):
    below, keys = MemoryStore(), fresh_keys(5)
    plant(first, keys[::2])
    plant(below, keys)
    store = open_tiers(first, below)
    load(store, keys)
    assert get(first, keys, [SIZE] * 5) == values_of(keys)
    assert copies_of(store) == {"promoted": 2}
    tells = store.optional(TellsTiers)
    assert tells.which_tier(keys) == [0] * 5
    assert tells.promoted_from(keys) == [0, 1, 0, 1, 0]


def test_values_that_no_get_has_found_below_stay_out_of_the_first_tier(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(2)
    plant(below, keys)
    store = open_tiers(first, below)
    store.optional(Promotes).promote(keys, empty_slots([SIZE] * 2))
    assert first.match(keys) == 0


def test_what_lies_in_the_last_of_three_tiers_goes_to_the_first_alone(open_tiers):
    first, middle, last = MemoryStore(), MemoryStore(), MemoryStore()
    store, keys = open_tiers(first, middle, last), fresh_keys(3)
    plant(middle, keys[:1])
    plant(last, keys[1:])
    load(store, keys)
    assert [each.which_stored(keys) for each in (first, middle)] == [[True] * 3, [True, 0, 0]]
    assert store.optional(TellsTiers).promoted_from(keys) == [1, 2, 2]
    assert [copies_of(store, number)["promoted"] for number in (1, 2)] == [1, 2]


def test_what_has_gone_down_again_is_promoted_no_more(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(2)
    plant(below, keys)
    store = open_tiers(first, below)
    load(store, keys)
    first.remove(keys[:1])
    assert store.match(keys) == 2
    tells = store.optional(TellsTiers)
    assert (tells.which_tier(keys), tells.promoted_from(keys)) == ([1, 0], [0, 1])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def full(clock):
    """A first tier with room for two values, and its two, the oldest of which is 30 s old."""
    first, keys = MemoryStore(budget=2 * SIZE, lease_s=1.0, clock=clock), fresh_keys(2)
    plant(first, keys[:1])
    clock.now += 20
    plant(first, keys[1:])
    clock.now += 10
    return first, keys


@pytest.mark.parametrize("admission", [None, Rule(False)], ids=["none", "refuses"])
def test_a_full_first_tier_keeps_what_it_has_if_nobody_says_otherwise(open_tiers, full, admission):
    (first, old), below, keys = full, MemoryStore(), fresh_keys(1)
    plant(below, keys)
    store = open_tiers(first, below)
    if admission is not None:
        store.optional(TakesAdmission).use_admission(admission)
    load(store, keys)
    assert first.which_stored([*old, *keys]) == [True, True, False]
    assert store.optional(TellsTiers).which_tier(keys) == [1]
    assert copies_of(store) == {}
    if admission is not None:
        assert admission.ages == [30.0]


def test_what_the_admission_prefers_evicts_the_oldest_value(open_tiers, full):
    (first, old), below, keys = full, MemoryStore(), fresh_keys(1)
    plant(below, keys)
    store = open_tiers(first, below)
    store.optional(TakesAdmission).use_admission(Rule(True))
    load(store, keys)
    assert first.which_stored([*old, *keys]) == [False, True, True]
    assert copies_of(store) == {"promoted": 1}


def test_nothing_leased_goes_for_what_is_found_below(open_tiers, full):
    (first, old), below, keys = full, MemoryStore(), fresh_keys(3)
    plant(below, keys)
    store = open_tiers(first, below)
    store.optional(TakesAdmission).use_admission(Rule(True))
    assert store.match(old) == 2
    load(store, keys)
    assert first.which_stored([*old, *keys]) == [True, True, False, False, False]
    assert store.optional(TellsTiers).which_tier(keys) == [1, 1, 1]
    assert copies_of(store) == {}


def test_as_much_goes_up_as_finds_room(open_tiers):
    first, below, keys = MemoryStore(budget=2 * SIZE, lease_s=60), MemoryStore(), fresh_keys(3)
    plant(below, keys)
    store = open_tiers(first, below)
    load(store, keys)
    assert first.match(keys) == 2
    assert store.optional(TellsTiers).which_tier(keys) == [0, 0, 1]
    assert copies_of(store) == {"promoted": 2}


class Stops(MemoryStore):
    """Its puts begin, and end when they are let go."""

    def __init__(self):
        super().__init__()
        self.begun = []
        self.go = threading.Event()

    def put(self, keys, slots):
        self.begun.append(list(keys))
        assert self.go.wait(20)
        return super().put(keys, slots)


@pytest.fixture
def under_way(open_tiers):
    """A promotion of two values that is in its put: the store, its tiers and the keys."""
    first, below, keys = Stops(), MemoryStore(), fresh_keys(2)
    plant(below, keys)
    store = open_tiers(first, below)
    thread = threading.Thread(target=load, args=(store, keys))
    thread.start()
    eventually(lambda: first.begun, 10)
    yield store, first, below, keys
    first.go.set()
    thread.join(20)
    assert not thread.is_alive()


def test_two_loads_of_a_key_put_it_up_once(under_way):
    store, first, below, keys = under_way
    more = [*keys, *fresh_keys(1)]
    plant(below, more[2:])
    other = threading.Thread(target=load, args=(store, more))
    other.start()
    eventually(lambda: len(first.begun) == 2, 10)
    first.go.set()
    other.join(20)
    assert first.begun == [keys, more[2:]]
    eventually(lambda: copies_of(store) == {"promoted": 3}, 10)


def test_what_another_process_has_put_up_is_not_put_again(open_tiers):
    first, below, keys = Stops(), MemoryStore(), fresh_keys(2)
    first.go.set()
    plant(below, keys)
    store = open_tiers(first, below)
    slots = empty_slots([SIZE] * 2)
    assert store.get(keys, slots) == 2
    plant(first, keys[:1])
    first.begun.clear()
    store.optional(Promotes).promote(keys, slots)
    assert first.begun == [keys[1:]]
    assert store.optional(TellsTiers).which_tier(keys) == [0, 0]
    assert copies_of(store) == {"promoted": 1}


def test_a_clear_waits_for_what_is_going_up(under_way):
    store, first, below, keys = under_way
    cleared = threading.Thread(target=store.clear, args=(keys[0].split(":")[1],))
    cleared.start()
    cleared.join(0.2)
    assert cleared.is_alive()
    first.go.set()
    cleared.join(20)
    assert not any(first.which_stored(keys) + below.which_stored(keys))


def test_what_was_read_before_a_clear_does_not_go_up_after_it(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(2)
    plant(below, keys)
    store = open_tiers(first, below)
    slots = empty_slots([SIZE] * 2)
    assert store.get(keys, slots) == 2
    store.clear(keys[0].split(":")[1])
    store.optional(Promotes).promote(keys, slots)
    assert first.match(keys) == 0


def test_what_was_read_in_another_tier_than_it_was_found_in_since_does_not_go_up(open_tiers):
    """Another process purges between the read of this thread and a search of another thread."""
    first, middle, last, keys = MemoryStore(), MemoryStore(), MemoryStore(), fresh_keys(2)
    plant(middle, keys)
    store, other = open_tiers(first, middle, last), open_tiers(first, middle, last)
    slots = empty_slots([SIZE] * 2)
    assert store.get(keys, slots) == 2
    other.clear(keys[0].split(":")[1])
    plant(last, keys)  # a save of the time after the purge has gone down, and is found there
    search = threading.Thread(target=store.match, args=(keys,))
    search.start()
    search.join(20)
    assert store.optional(TellsTiers).which_tier(keys) == [2, 2]
    store.optional(Promotes).promote(keys, slots)
    assert first.match(keys) == 0


class SlowNumbers(WrapperStore):
    """Its searches for purge numbers take a while if `delay_s` is set."""

    delay_s = 0.0

    def match(self, keys):
        if ":purge:" in keys[0]:
            time.sleep(self.delay_s)
        return super().match(keys)


@pytest.fixture
def slow(open_tiers, monkeypatch):
    """A stack over a tier that will be slow to tell its purge numbers, and keys that it has."""
    below, keys = SlowNumbers(MemoryStore()), fresh_keys(4)
    plant(below, keys)
    store = open_tiers(MemoryStore(), below, limits=[Limits(look_s=0.05)])
    load(store, keys[:1])
    monkeypatch.setattr(purges, "FRESH_S", 0.0)
    return store, below, keys


def test_a_load_does_not_fall_short_because_purge_numbers_are_read_slowly(slow):
    store, below, keys = slow
    below.delay_s = 0.3
    load(store, keys[1:])


def test_a_first_tier_that_is_slow_leaves_no_lower_tier_out(open_tiers):
    first, below, keys = SlowNumbers(MemoryStore()), MemoryStore(), fresh_keys(2)
    plant(below, keys)
    store = open_tiers(first, below, limits=[Limits(look_s=0.05)])
    first.delay_s = 0.2
    load(store, keys)
    assert not store.lower[0].is_out
    assert first.match(keys) == 2


def test_what_is_taken_out_again_counts_as_found_below(slow):
    store, below, keys = slow
    slots = empty_slots([SIZE] * 3)
    assert store.get(keys[1:], slots) == 3

    def put_and_be_late(keys, slots):
        below.delay_s = 0.3
        return store.first.put(keys, slots)

    store.optional(Promotes).promote(keys[1:], slots, put_and_be_late)
    assert store.first.which_stored(keys) == [True, False, False, False]
    assert store.optional(TellsTiers).which_tier(keys) == [0, 1, 1, 1]
    assert copies_of(store) == {"promoted": 1}


def test_what_was_read_before_another_promotion_does_not_go_up_after_a_purge(
    open_tiers, monkeypatch
):
    """A load may promote other values, those that a copy in place has missed, in between."""
    monkeypatch.setattr(purges, "FRESH_S", 0.0)
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(3)
    plant(below, keys)
    store, other = open_tiers(first, below), open_tiers(first, below)
    slots = empty_slots([SIZE] * 2)
    assert store.get(keys[:2], slots) == 2
    load(store, keys[2:])
    assert first.match(keys[2:]) == 1
    other.clear(keys[0].split(":")[1])
    store.optional(Promotes).promote(keys[:2], slots)
    assert not any(first.which_stored(keys) + below.which_stored(keys))


def test_a_search_that_began_before_a_removal_notes_nothing():
    found, keys = Whereabouts(), fresh_keys(2)
    since = found.num_forgotten
    found.note(1, keys, since)
    assert found.which_tier(keys) == [1, 1]
    found.forget(keys[:1].__contains__)
    found.note(1, keys[:1], since)
    assert found.which_tier(keys) == [0, 1]


def test_a_sealed_value_goes_up_sealed(open_tiers, tmp_path):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(3)
    settings = Settings(seal_key_file=write_seal_key(tmp_path / "seal.key"))
    plant(seal_store(below, settings), keys)
    store = seal_store(open_tiers(first, below), settings)
    load(store, keys)
    assert get(seal_store(first, settings), keys, [SIZE] * 3) == values_of(keys)
    sealed = SIZE + store.added_bytes
    assert not {content(key, SIZE) for key in keys} & {
        value[:SIZE] for value in get(first, keys, [sealed] * 3)
    }
    assert store.optional(TellsTiers).promoted_from(keys) == [1, 1, 1]
