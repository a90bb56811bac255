"""Leases are renewed where each value was found, and no lower tier is searched for more."""

from __future__ import annotations

import time

import pytest

from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsAgain, FindsKeys, TellsReads, TellsTiers, tier_names
from pdstore.store.seal import seal_store
from pdstore.store.tiers.lower import Limits
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import get, put
from tests.store.tiers.conftest import held
from tests.support.kv import eventually
from tests.support.seal_key import write_seal_key

SIZE = 4096


def plant(store, keys):
    put(store, keys, [content(key, SIZE) for key in keys])


class Spied(WrapperStore):
    """Notes the keys of each match and search. passes: may be empty, for a store of a plug-in."""

    def __init__(self, wrapped, passes=(FindsKeys,)):
        super().__init__(wrapped)
        self.passes = passes
        self.asked = []

    def match(self, keys):
        self.asked.append([*keys])
        return super().match(keys)

    def optional(self, protocol):
        return self if protocol is FindsKeys and self.passes else super().optional(protocol)

    def which_stored(self, keys):
        self.asked.append([*keys])
        return self.wrapped.which_stored(keys)


@pytest.fixture
def tiers():
    return [Spied(MemoryStore()) for _ in range(3)]


@pytest.fixture
def keys(tiers):
    """Six keys, in the three tiers in turn."""
    keys = fresh_keys(6)
    for number, tier in enumerate(tiers):
        plant(tier, keys[number::3])
    return keys


def forget_calls(tiers):
    for tier in tiers:
        tier.asked.clear()


def test_each_value_is_matched_in_the_tier_where_it_was_found(open_tiers, tiers, keys):
    store = open_tiers(*tiers)
    assert store.match(keys) == 6
    forget_calls(tiers)
    assert store.optional(FindsAgain).match_again(keys) == 6
    assert [tier.asked for tier in tiers[1:]] == [[keys[1::3]], [keys[2::3]]]
    assert store.optional(TellsTiers).which_tier(keys) == [0, 1, 2] * 2


def test_what_was_found_nowhere_is_looked_for_in_the_first_tier_alone(open_tiers, tiers, keys):
    store, more = open_tiers(*tiers), fresh_keys(3)
    assert store.match([*keys, *more]) == 6
    plant(tiers[0], more[:1])
    plant(tiers[1], more[1:])
    forget_calls(tiers)
    assert store.optional(FindsAgain).match_again([*keys, *more]) == 7
    assert not [key for tier in tiers[1:] for call in tier.asked for key in call if key in more]
    assert store.match([*keys, *more]) == 9


def test_what_went_up_meanwhile_is_matched_above(open_tiers, tiers, keys):
    store = open_tiers(*tiers)
    assert store.match(keys) == 6
    plant(tiers[0], keys[1:3])
    tiers[1].remove(keys[1:2])
    assert store.optional(FindsAgain).match_again(keys) == 6
    assert store.optional(TellsTiers).which_tier(keys) == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("number", range(3))
def test_the_answer_shrinks_if_a_value_is_gone(open_tiers, tiers, keys, number):
    store = open_tiers(*tiers)
    assert store.match(keys) == 6
    tiers[number].remove(keys[3:][number : number + 1])
    assert store.optional(FindsAgain).match_again(keys) == 3 + number


@pytest.mark.parametrize("number", range(2))
def test_a_tier_that_cannot_search_is_asked_by_matches(open_tiers, tiers, keys, number):
    tiers[number].passes = ()
    store = open_tiers(*tiers)
    assert store.match(keys) == 6
    again = store.optional(FindsAgain)
    assert again.match_again(keys) == 6
    tiers[0].remove(keys[3:4])
    assert again.match_again(keys) == 3


def test_a_tier_that_hangs_is_waited_for_once_and_has_nothing(open_tiers):
    first, below = MemoryStore(), Faulty(MemoryStore())
    store, keys = open_tiers(first, below, limits=[Limits(look_s=0.05)]), fresh_keys(4)
    plant(first, keys[:2])
    plant(below, keys[2:])
    assert store.match(keys) == 4
    again = store.optional(FindsAgain)
    with held(below):
        began = time.monotonic()
        assert [again.match_again(keys) for _ in range(20)] == [2] * 20
        assert time.monotonic() - began < 1.0
    eventually(lambda: again.match_again(keys) == 4)


@pytest.mark.parametrize(("leases", "shortest"), [((8, 5), 5), ((8, 0), 8), ((0, 0), 0)])
def test_a_tier_without_leases_does_not_hide_those_of_the_others(open_tiers, leases, shortest):
    store = open_tiers(*(MemoryStore(lease_s=lease) for lease in leases))
    assert store.optional(FindsAgain).shortest_lease_s == shortest
    assert store.lease_s == min(leases), "all of an answer is promised for no longer"


def test_a_search_again_leases_nothing_and_asks_no_lower_tier(open_tiers, tiers, keys):
    store, more = open_tiers(*tiers), fresh_keys(1)
    assert store.match(keys) == 6
    forget_calls(tiers)
    again = store.optional(FindsAgain)
    assert again.which_again([*more, *keys[::-1]]) == [False, *[True] * 6]
    assert [*tiers[1].asked, *tiers[2].asked] == []


@pytest.mark.parametrize("is_sealed", [False, True])
def test_an_engines_store_offers_it_and_counts_its_calls(
    open_tiers, tiers, keys, tmp_path, is_sealed
):
    settings = Settings(seal_key_file=write_seal_key(tmp_path / "key") if is_sealed else None)
    metrics = Metrics()
    store = GuardedStore(seal_store(open_tiers(*tiers), settings), metrics)
    assert store.match(keys) == 6
    assert store.optional(FindsAgain).match_again(keys) == 6
    labels = {"verb": "match", "outcome": "ok"}
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", labels) == 2
    assert tier_names(store) == ["0 memory", "1 memory", "2 memory"]


def test_a_store_without_tiers_has_neither(tmp_path):
    store = MemoryStore()
    assert (store.optional(FindsAgain), store.optional(TellsReads)) == (None, None)
    assert tier_names(store) == []


def test_a_read_tells_from_where_it_was_also_after_the_value_went_up(open_tiers):
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(4)
    store = open_tiers(first, below)
    plant(store, keys[:2])
    plant(below, keys[2:])
    reads = store.optional(TellsReads)
    assert store.match(keys) == 4
    assert reads.which_read(keys) == [0] * 4, "nothing was read"
    assert get(store, keys, [SIZE] * 4) == [content(key, SIZE) for key in keys]
    plant(store, keys[2:])
    assert reads.which_read(keys) == [0, 0, 1, 1]
    get(store, keys, [SIZE] * 4)
    assert reads.which_read(keys) == [0] * 4


def test_the_names_of_tiers_have_no_secret(open_tiers, tmp_path):
    class Named(WrapperStore):
        def __init__(self, label):
            super().__init__(MemoryStore())
            self.label = label

    store = open_tiers(Named("redis+unix://u@h"), Named(f"file://{tmp_path}/a b://c?x=1"))
    assert tier_names(store) == ["0 redis+unix", "1 file"]
