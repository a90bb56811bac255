"""When a put counts, and what it does when it does not: rule 4 of deploy/mooncake.md."""

from __future__ import annotations

import time

import pytest

from pdstore.errors import StoreFull, StoreUnavailable
from pdstore.testing import fresh_keys
from pdstore.testing.values import put

SIZE = 256


def test_no_room_is_tried_again_after_growing_pauses_and_then_store_full(store, raw):
    """Rule 4: after 10, 30 and 90 ms; only the keys that found no room."""
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0]), ("put", [-200]), ("put", [-200])]
    start = time.monotonic()
    assert put(store, keys, [b"x" * SIZE] * 3) == 3
    assert time.monotonic() - start >= 0.13
    assert [call[1] for call in raw.calls if call[0] == "put"] == [keys, *[[keys[1]]] * 3]
    raw.calls.clear()
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0])] + [("put", [-200])] * 3
    with pytest.raises(StoreFull) as caught:
        put(store, keys, [b"x" * SIZE] * 3)
    assert caught.value.num_done == 1


def test_a_failed_transfer_is_put_once_more_and_then_unavailable(store, raw):
    """Rule 4."""
    keys = fresh_keys(2)
    raw.script = [("put", [0, -800])]
    assert put(store, keys, [b"x"] * 2) == 2
    assert raw.count("put") == 2
    raw.calls.clear()
    raw.script = [("put", [-800]), ("put", [-800])]
    with pytest.raises(StoreUnavailable, match="holds the memory"):
        put(store, fresh_keys(1), [b"x"])
    assert raw.count("put") == 2


def test_a_value_that_is_evicted_before_it_is_leased_is_put_again(store, raw):
    """Rule 4."""
    keys = fresh_keys(1)
    raw.script = [("put", [0])]
    evicted = []

    def evict_once(asked):
        if not evicted:
            evicted.append(raw.values.pop(keys[0]))
        return [int(key in raw.values) for key in asked]

    raw.batch_is_exist = evict_once
    assert put(store, keys, [b"x"]) == 1
    assert raw.count("put") == 2
