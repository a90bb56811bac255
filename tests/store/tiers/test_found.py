"""In which tier a store says that it found a key, and the tier where hand-offs meet."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys, TellsTiers, meeting_store_of
from pdstore.store.seal import seal_store
from pdstore.store.tiers.found import Whereabouts
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import get, put

SIZE = 4096


def plant(store, keys):
    put(store, keys, [content(key, SIZE) for key in keys])


def test_a_match_and_a_get_tell_where_they_found_each_key(open_tiers):
    first, middle, last = MemoryStore(), MemoryStore(), MemoryStore()
    store = open_tiers(first, middle, last)
    keys = fresh_keys(6)
    for number, tier in enumerate((first, middle, last)):
        plant(tier, keys[number::3])
    tells = store.optional(TellsTiers)
    assert tells.which_tier(keys) == [0] * 6
    assert store.match(keys) == 6
    assert tells.which_tier(keys) == [0, 1, 2] * 2
    again = open_tiers(first, middle, last)
    assert get(again, keys, [SIZE] * 6) == [content(key, SIZE) for key in keys]
    assert again.optional(TellsTiers).which_tier(keys) == [0, 1, 2] * 2


def test_what_is_put_or_removed_is_not_said_to_lie_below(open_tiers):
    first, below = MemoryStore(), MemoryStore()
    store = open_tiers(first, below)
    keys = fresh_keys(3)
    plant(below, keys)
    assert store.match(keys) == 3
    tells = store.optional(TellsTiers)
    plant(store, keys[:1])
    store.remove(keys[1:2])
    assert tells.which_tier(keys) == [0, 0, 1]
    plant(first, keys[2:])
    assert store.match(keys[2:]) == 1
    assert tells.which_tier(keys) == [0, 0, 0]


def test_the_keys_found_longest_ago_are_forgotten_first():
    found = Whereabouts(most_keys=2)
    one, two, three = fresh_keys(3)
    found.note(1, [one, two])
    found.note(2, [one])
    found.note(1, [three])
    assert found.which_tier([one, two, three]) == [2, 0, 1]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_hand_offs_meet_in_the_first_tier_behind_every_wrapper(open_tiers, tmp_path, is_sealed):
    first, below = MemoryStore(), MemoryStore()
    settings = Settings(seal_key_file=seal_key(tmp_path) if is_sealed else None)
    metrics = Metrics()
    store = GuardedStore(seal_store(open_tiers(first, below), settings), metrics)
    keys = fresh_keys(4)
    plant(store, keys)
    first.remove(keys[2:])
    meeting = meeting_store_of(store)
    assert meeting.match(keys) == 2
    assert meeting.optional(FindsKeys).which_stored(keys) == [True, True, False, False]
    assert get(meeting, keys[:2], [SIZE] * 2) == [content(key, SIZE) for key in keys[:2]]
    labels = {"verb": "match", "outcome": "ok"}  # the whole store's metrics count the calls
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", labels) == 2


def test_a_failed_call_of_the_meeting_tier_opens_the_breaker_of_the_whole(open_tiers):
    first = Faulty(MemoryStore(), error_rate=1.0)
    store = GuardedStore(open_tiers(first, MemoryStore()), Metrics(), failures=1)
    with pytest.raises(StoreUnavailable):
        meeting_store_of(store).match(fresh_keys(1))
    assert store.is_open
    store.close()


def test_a_store_without_tiers_is_its_own_meeting_tier():
    store = MemoryStore()
    assert meeting_store_of(store) is store
    assert store.optional(TellsTiers) is None


def seal_key(tmp_path):
    path = tmp_path / "seal.key"
    path.write_text("5f" * 32 + "\n")
    path.chmod(0o600)
    return path
