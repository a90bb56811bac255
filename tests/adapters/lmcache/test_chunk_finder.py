"""ChunkFinder: keys behind gaps are found, also in a store that knows only prefixes."""

from __future__ import annotations

import pytest

from pdstore.adapters.lmcache.chunk_finder import ChunkFinder
from pdstore.errors import StoreError
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import fresh_keys, put
from tests.support.scripted_store import Scripted

KEYS = fresh_keys(6)


@pytest.mark.parametrize("wrapper", [lambda store: store, WrapperStore])
@pytest.mark.parametrize("stored", [[], [0, 1], [2, 3], [0, 3, 5], [0, 1, 2, 3, 4, 5]])
def test_what_is_stored_is_found_behind_gaps_too(wrapper, stored):
    store = MemoryStore()
    keys = [KEYS[number] for number in stored]
    put(store, keys, [b"v"] * len(keys))
    assert ChunkFinder(wrapper(store)).find(KEYS) == set(keys)


@pytest.mark.parametrize("answer", [7, -1, True, "2"])
def test_an_impossible_answer_is_an_error_of_the_store(answer):
    with pytest.raises(StoreError, match="answered"):
        ChunkFinder(Scripted(answer)).find(KEYS)
