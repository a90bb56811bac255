"""MarkerSearch: the stored keys among many, by one call or by a few in turn."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.scheduler.marker_search import MarkerSearch
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore

KEYS = [BlockKey(f"k{i}") for i in range(20)]


@pytest.fixture
def store():
    store = MemoryStore()
    store.put(KEYS[3::5], Slots(memoryview(bytearray(8)), 8, [0] * 4, [8] * 4))
    return store


def test_a_store_that_can_is_asked_once(store):
    search = MarkerSearch(store)
    assert search.stored(KEYS) == set(KEYS[3::5])
    assert search.num_calls(len(KEYS)) == 1


def test_any_other_store_is_asked_for_each_key_in_its_turn(store):
    search = MarkerSearch(WrapperStore(store), most_calls=8)
    found = [search.stored(KEYS) for _ in range(5)]
    assert found[0] | found[1] | found[2] == set(KEYS[3::5])
    assert found[0] == {"k3"}
    assert search.num_calls(len(KEYS)) == 8
    assert search.num_calls(3) == 3


def test_few_keys_are_asked_for_at_once(store):
    assert MarkerSearch(WrapperStore(store)).stored(KEYS[2:5]) == {"k3"}


@pytest.mark.parametrize("answer", [-1, 2, None, True])
def test_an_impossible_answer_is_an_error(store, answer):
    class Lying(WrapperStore):
        def match(self, keys):
            return answer

    with pytest.raises(StoreError):
        MarkerSearch(Lying(store)).stored(KEYS)
