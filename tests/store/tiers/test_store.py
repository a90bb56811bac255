"""Which tier answers a call, how many calls that takes, and what a tier costs that hangs."""

from __future__ import annotations

import contextlib
import re

import pytest

from pdstore.errors import ConfigError, StoreError, StoreFull, StoreUnavailable, WrongLength
from pdstore.format.keys import BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.connect import check_url, place_of
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import (
    EvictsByUse,
    FindsKeys,
    HasTiers,
    ListsValues,
    RenewsUnread,
    TellsChanges,
    TellsRemovals,
    TellsRoom,
)
from pdstore.store.url import Reach
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import empty_slots, get, put
from tests.store.tiers.conftest import copies_of
from tests.support.clock import Clock

SIZE = 4096


class Counting(MemoryStore):
    """Counts the calls that search or read."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def match(self, keys):
        self.calls.append(("match", len(keys)))
        return super().match(keys)

    def which_stored(self, keys):
        self.calls.append(("which", len(keys)))
        return super().which_stored(keys)

    def get(self, keys, slots):
        self.calls.append(("get", len(keys)))
        return super().get(keys, slots)


def plant(store, keys, size=SIZE):
    put(store, keys, [content(key, size) for key in keys])


def values_of(keys):
    return [content(key, SIZE) for key in keys]


@pytest.fixture
def three(open_tiers):
    tiers = Counting(), Counting(), Counting()
    return open_tiers(*tiers), *tiers


def spread(keys, *stores):
    """Puts each key into the next store in turn."""
    for number, store in enumerate(stores):
        plant(store, keys[number :: len(stores)])
        getattr(store, "calls", []).clear()


def test_what_is_all_above_costs_one_search_of_one_tier(three):
    store, first, middle, last = three
    keys = fresh_keys(8)
    plant(first, keys)
    assert store.match(keys) == 8
    assert first.calls == [("match", 8)]
    assert middle.calls == last.calls == []


def test_keys_that_alternate_between_two_tiers_cost_few_calls(open_tiers):
    first, below, keys = Counting(), Counting(), fresh_keys(512)
    store = open_tiers(first, below)
    spread(keys, first, below)
    assert store.match(keys) == 512
    assert first.calls == [("match", 512), ("which", 511), ("match", 255)]
    assert below.calls == [("match", 256)]
    first.calls.clear()
    below.calls.clear()
    assert get(store, keys, [SIZE] * 512) == values_of(keys)
    calls = [[call for call in tier.calls if call[1] > 2] for tier in (first, below)]
    assert list(map(len, calls)) == [3, 1], "and purge numbers are read once a second"


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4, 5, 11])
def test_the_result_ends_at_the_first_key_that_no_tier_has(three, missing):
    store, *tiers = three
    keys = fresh_keys(12)
    spread(keys, *tiers)
    for tier in tiers:
        tier.remove([keys[missing]])
    assert store.match(keys) == missing
    assert get(store, keys, [SIZE] * 12) == values_of(keys)[:missing]
    found = store.optional(FindsKeys).which_stored(keys)
    assert found == [i != missing for i in range(12)]
    gone = store.optional(TellsRemovals).which_removed(keys)
    assert gone == [i == missing for i in range(12)]


def test_each_key_is_leased_in_the_tier_that_has_it(open_tiers):
    clock = Clock()
    first, below = (MemoryStore(budget=4 * SIZE, lease_s=60, clock=clock) for _ in range(2))
    store, keys = open_tiers(first, below), fresh_keys(8)
    spread(keys, first, below)
    clock.now += 10
    assert store.match(keys) == 8
    clock.now += 10
    for tier in (first, below):
        with pytest.raises(StoreFull):
            plant(tier, fresh_keys(1))
    clock.now += 60
    for tier in (first, below):
        plant(tier, fresh_keys(1))


def test_a_key_in_both_tiers_is_read_from_the_faster(open_tiers):
    first, below, keys = MemoryStore(), Counting(), fresh_keys(2)
    put(below, keys, [b"b" * SIZE] * 2)
    put(first, keys, [b"a" * SIZE] * 2)
    store = open_tiers(first, below)
    assert get(store, keys, [SIZE] * 2) == [b"a" * SIZE] * 2
    assert below.calls == []


def test_tails_and_markers_are_not_looked_for_below(open_tiers):
    first, below = MemoryStore(), Counting()
    store = open_tiers(first, below)
    [key] = fresh_keys(1)
    for name in (f"{key}:partial:3", f"pds1:{'a' * 32}:handoff:{'b' * 32}:0:done"):
        assert store.match([BlockKey(name)]) == 0
        assert get(store, [BlockKey(name)], [SIZE]) == []
        store.remove([BlockKey(name)])
    assert below.calls == []


def test_a_tail_that_lies_below_is_not_found_behind_blocks_that_do(three):
    store, first, *below = three
    [a, b, c] = fresh_keys(3)
    tail = BlockKey(f"{c}:partial:3")
    plant(first, [b])
    for tier in below:  # one of them was a pool by itself once
        plant(tier, [a, c, tail])
    keys = [a, b, c, tail]
    for num_found in (3, 4):
        assert store.match(keys) == num_found
        assert get(store, keys, [SIZE] * 4) == values_of(keys)[:num_found]
        plant(first, [tail])


def test_a_value_of_wrong_length_above_is_read_below_and_removed_above(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(4)
    plant(first, keys[:1] + keys[2:])
    plant(first, keys[1:2], size=100)
    plant(below, keys)
    store = open_tiers(first, below)
    assert get(store, keys, [SIZE] * 4) == values_of(keys)
    assert first.which_stored(keys) == [True, False, True, True]
    assert below.match(keys) == 4
    assert copies_of(store, 0) == {"wrong": 1}


def test_values_of_wrong_length_above_are_read_below(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(8)
    for i, key in enumerate(keys):
        plant(first, [key], size=100 if i in (1, 3, 4, 7) else SIZE)
    plant(below, keys)
    store = open_tiers(first, below)
    assert get(store, keys, [SIZE] * 8) == values_of(keys)
    assert first.which_stored(keys) == [i not in (1, 3, 4, 7) for i in range(8)]
    plant(first, keys[4:5], size=100)
    below.remove(keys[4:5])
    with pytest.raises(WrongLength) as caught:
        store.get(keys, empty_slots([SIZE] * 8))
    assert caught.value.num_done == 4
    assert first.match(keys[4:5]) == 1, "nothing says that its length is not right"


class Evicting(MemoryStore):
    """Evicts a value after each search that found it."""

    victims = ()

    def which_stored(self, keys):
        found = super().which_stored(keys)
        self.remove(self.victims[:1])
        self.victims = self.victims[1:]
        return found


def test_what_is_evicted_during_a_get_is_read_below(open_tiers):
    first, below, keys = Evicting(), MemoryStore(), fresh_keys(6)
    plant(first, keys[1:])
    plant(below, [keys[0], *keys[2:]])
    first.victims = [keys[3], keys[5]]
    store = open_tiers(first, below)
    assert get(store, keys, [SIZE] * 6) == values_of(keys)
    first.remove(keys[4:5])
    below.remove(keys[:1])
    assert get(store, keys, [SIZE] * 6) == []


@pytest.mark.parametrize("above", [True, False])
def test_a_value_of_wrong_length_everywhere_raises(open_tiers, above):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(3)
    plant(first, keys[:1])
    plant(below, keys[1:2], size=100)
    if above:
        plant(first, keys[1:2], size=50)
    store = open_tiers(first, below)
    with pytest.raises(WrongLength) as caught:
        store.get(keys, empty_slots([SIZE] * 3))
    assert caught.value.num_done == 1
    store.remove(keys[1:2])
    assert store.match(keys) == 1


def test_the_first_tiers_failure_is_the_pools(open_tiers):
    first = Faulty(MemoryStore(), error_rate=1.0)
    store, keys = open_tiers(first, MemoryStore()), fresh_keys(2)
    for call in (store.match, store.remove):
        with pytest.raises(StoreUnavailable):
            call(keys)
    with pytest.raises(StoreUnavailable):
        get(store, keys, [SIZE] * 2)


def test_a_failing_tier_below_has_nothing(open_tiers):
    first, below = MemoryStore(), Faulty(MemoryStore(), error_rate=1.0)
    store, keys = open_tiers(first, below), fresh_keys(4)
    plant(first, keys[:2])
    for _ in range(8):
        assert store.match(keys) == 2
        assert get(store, keys, [SIZE] * 4) == values_of(keys[:2])
    assert "is left out" in store.optional(TellsRoom).room().problem
    store.remove(keys[:1])
    assert first.match(keys[:1]) == 0
    with pytest.raises(StoreError, match="not this one"):
        store.clear(keys[0].split(":")[1])
    assert first.match(keys[1:2]) == 0


class Misanswers(MemoryStore):
    """A plug-in's store with a defect: it answers about some keys only, or with other things."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def which_stored(self, keys):
        return self.answer(super().which_stored(keys))


@pytest.mark.parametrize(
    "answer",
    [lambda found: found[:1], lambda found: [*found, True], lambda found: [1] * len(found)],
    ids=["too few", "too many", "no bools"],
)
def test_an_impossible_answer_to_a_search_is_the_tiers_failure(open_tiers, answer):
    keys = fresh_keys(4)
    store = open_tiers(Misanswers(answer), MemoryStore())
    for call in (store.match, lambda keys: store.get(keys, empty_slots([SIZE] * 4))):
        with pytest.raises(StoreError, match=r"answered about|did not answer"):
            call(keys)
    middle, last = Misanswers(answer), MemoryStore()
    plant(middle, keys[1:])
    plant(last, keys[:2])
    store = open_tiers(MemoryStore(), middle, last)
    assert store.match(keys) == 2
    assert get(store, keys, [SIZE] * 4) == values_of(keys[:2])


class Plain(WrapperStore):
    """A store of a plug-in that offers nothing beyond the contract."""


def test_a_plug_ins_store_may_be_any_tier(open_tiers):
    keys = fresh_keys(6)
    for stores in ((Plain(MemoryStore()), MemoryStore()), (MemoryStore(), Plain(MemoryStore()))):
        store = open_tiers(*stores)
        spread(keys[:3], stores[0])
        spread(keys[3:], stores[1])
        assert store.match(keys) == 6
        assert get(store, keys, [SIZE] * 6) == values_of(keys)
        assert store.optional(FindsKeys) is None
        assert store.optional(TellsRemovals) is None
        assert store.optional(ListsValues) is None


def test_what_all_tiers_offer_together(open_tiers, arena_of):
    arena, below, keys = arena_of(), MemoryStore(), fresh_keys(4)
    store = open_tiers(arena, below)
    plant(arena, keys[:3])
    plant(below, keys[1:])
    lists = store.optional(ListsValues)
    assert sorted(value.key for value in lists.stored_values()) == sorted(keys)
    assert [lists.length_of(key) for key in (keys[0], keys[3], *fresh_keys(1))] == [
        SIZE,
        SIZE,
        None,
    ]
    assert store.optional(EvictsByUse).oldest_age_s([1 << 40]) is None, "each save is admitted"
    assert store.optional(TellsChanges) is arena
    assert [each.label for each in store.optional(HasTiers).tiers] == [arena.label, below.label]
    assert store.optional(RenewsUnread) is None, "hand-offs are renewed in the first tier"
    assert store.lease_s == min(arena.lease_s, below.lease_s)


def test_a_lower_tiers_url_may_have_copy_and_look(tmp_path):
    settings = Settings()
    url = f"memory://urls file://{tmp_path}/p%20ool?budget=1GiB&copy=200MB/s&look=50ms"
    check_url(url, settings)
    with contextlib.closing(open_store(url, settings)) as store:
        assert store.label.startswith("memory://urls file://")
        assert (tmp_path / "p ool").is_dir()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://a?copy=1MB/s file:///b", "unknown option 'copy'"),
        ("memory://a file:///b?copy=5", "copy='5' is no rate; write one like 500MB/s"),
        ("memory://a file:///b?copy=x/s", "copy='x' is no size"),
        ("memory://a file:///b?look=0", "look must be a positive number of seconds"),
        ("memory://a file:///b?look=100", "look=100 is too long"),
        ("memory://a file:///b?speed=9", "unknown option 'speed'"),
        ("file:///a memory://b", "memory://b is for one process, and the first tier"),
        (
            "file:///a file:///b file:///a?budget=1GiB",
            "is the place of two tiers: /a; name it once",
        ),
        ("shm://a shm://a", "shm://a is the place of two tiers"),
        ("redis://host shm://b", "a lower tier must be there for all instances"),
        ("file:///mnt/my pool", "write %20 for a blank inside a URL"),
        ("shm://a file:///mnt/my pool", "write %20 for a blank inside a URL"),
        ("shm://a files:///b", "did you mean file://?"),
    ],
)
def test_a_wrong_stack_is_refused_by_name(url, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_url(url, Settings())
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_store(url, Settings())


def test_no_error_shows_a_password():
    for url in ("redis://u:secret@h file:///b?x=1", "file:///b redis://u:secret@h?x=1"):
        with pytest.raises(ConfigError) as caught:
            check_url(url, Settings())
        assert "secret" not in str(caught.value)


def test_a_stack_is_where_its_first_tier_is(tmp_path):
    found = place_of(f"shm://a?dir={tmp_path} file:///b?copy=1MB/s", Settings())
    assert found.reach is Reach.HOST
    assert found.is_memory
    assert found.trial_url.endswith(" file:///b?copy=1MB/s")
    assert found.path.parent == tmp_path
