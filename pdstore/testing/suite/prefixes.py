"""Batches: results are prefixes, large batches work, and bad arguments are refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pdstore.format.keys import BlockKey
from pdstore.store.base import MAX_KEY_CHARS, Slots, Store
from pdstore.testing.values import (
    assert_values,
    content,
    empty_slots,
    filled_slots,
    fresh_keys,
    get,
    put,
)

SIZE = 256

Verb = Callable[[Store, Sequence[BlockKey]], object]

_VERBS: dict[str, Verb] = {
    "match": lambda store, keys: store.match(keys),
    "get": lambda store, keys: store.get(keys, empty_slots([SIZE] * len(keys))),
    "put": lambda store, keys: store.put(keys, filled_slots([b"x" * SIZE] * len(keys))),
    "remove": lambda store, keys: store.remove(keys),
}
every_verb = pytest.mark.parametrize("verb", _VERBS.values(), ids=_VERBS)


class PrefixTests:
    """Every result is "the first n"; a missing key is a number, a bad argument a ValueError."""

    @pytest.mark.parametrize("count", [1, 5])
    def test_missing_keys_are_a_miss(self, store: Store, count: int) -> None:
        keys = fresh_keys(count)
        assert store.match(keys) == 0
        assert_values(get(store, keys, [SIZE] * count), [])

    @pytest.mark.parametrize("gap", range(6))
    def test_match_stops_at_the_first_gap(self, store: Store, gap: int) -> None:
        keys = fresh_keys(6)
        stored = keys[:gap] + keys[gap + 1 :]
        put(store, stored, [content(key, SIZE) for key in stored])
        assert store.match(keys) == gap

    @pytest.mark.parametrize("gap", range(6))
    def test_get_stops_at_the_first_gap(self, store: Store, gap: int) -> None:
        keys = fresh_keys(6)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[:gap] + keys[gap + 1 :], values[:gap] + values[gap + 1 :])
        assert_values(get(store, keys, [SIZE] * 6), values[:gap])

    def test_values_behind_a_gap_are_there(self, store: Store) -> None:
        keys = fresh_keys(6)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[3:], values[3:])
        assert store.match(keys[3:]) == 3
        assert_values(get(store, keys[3:], [SIZE] * 3), values[3:])
        put(store, keys[:3], values[:3])
        assert_values(get(store, keys, [SIZE] * 6), values)

    def test_match_of_many_keys_stops_at_the_first_gap(self, store: Store) -> None:
        keys = fresh_keys(700)
        put(store, keys, [b"x"] * 700)
        assert store.match(keys) == 700
        for gap in (1, 31, 32, 33, 63, 64, 128, 159, 160, 161, 511, 671, 672, 699):
            store.remove([keys[gap]])
            assert store.match(keys) == gap
            put(store, [keys[gap]], [b"x"])

    def test_a_batch_may_have_2000_keys(self, store: Store) -> None:
        keys = fresh_keys(2000)
        values = [content(key, SIZE) for key in keys]
        assert put(store, keys, values) == 2000
        assert store.match(keys) == 2000
        assert_values(get(store, keys, [SIZE] * 2000), values)

    def test_an_empty_batch_is_zero(self, store: Store) -> None:
        nothing = empty_slots([])
        assert (store.match([]), store.get([], nothing), store.put([], nothing)) == (0, 0, 0)
        store.remove([])

    def test_batches_may_be_any_sequences(self, store: Store) -> None:
        keys = tuple(fresh_keys(3))
        slots = Slots(memoryview(bytearray(3 * SIZE)), SIZE, range(2, -1, -1), (SIZE,) * 3)
        assert store.put(keys, slots) == 3
        assert store.match(keys) == 3
        assert store.get(keys, replace(slots, numbers=(0, 1, 2))) == 3
        store.remove(keys)

    @every_verb
    def test_a_key_given_twice_is_refused(self, store: Store, verb: Verb) -> None:
        keys = fresh_keys(3)
        put(store, keys, [b"x" * SIZE] * 3)
        with pytest.raises(ValueError, match="distinct"):
            verb(store, [*keys, keys[1]])

    @every_verb
    @pytest.mark.parametrize(
        "bad", ["", "a/b", "/a", "a/", ".", "..", ".a", "a\nb", "a\0b", "\u00fc"]
    )
    def test_what_is_no_key_is_refused(self, store: Store, verb: Verb, bad: str) -> None:
        keys = fresh_keys(2)
        with pytest.raises(ValueError, match="bad block key"):
            verb(store, [keys[0], BlockKey(bad), keys[1]])

    @every_verb
    def test_a_key_that_is_too_long_is_refused(self, store: Store, verb: Verb) -> None:
        with pytest.raises(ValueError, match="bad block key"):
            verb(store, [BlockKey("k" * (MAX_KEY_CHARS + 1))])

    @pytest.mark.parametrize(
        "change",
        [
            {"numbers": [0]},
            {"sizes": [SIZE]},
            {"sizes": [SIZE, 0]},
            {"sizes": [SIZE, SIZE + 1]},
            {"sizes": [SIZE, -1]},
            {"numbers": [0, 2]},
            {"numbers": [0, -1]},
        ],
        ids=str,
    )
    def test_slots_that_do_not_fit_are_refused(
        self, store: Store, change: dict[str, list[int]]
    ) -> None:
        keys = fresh_keys(2)
        good = filled_slots([b"x" * SIZE] * 2)
        bad = Slots(
            good.view, SIZE, change.get("numbers", [0, 1]), change.get("sizes", [SIZE, SIZE])
        )
        with pytest.raises(ValueError, match=r"slot|not as many"):
            store.put(keys, bad)
        assert store.match(keys) == 0
        with pytest.raises(ValueError, match=r"slot|not as many"):
            store.get(keys, bad)

    def test_allocated_memory_is_zeroed_writable_and_aligned(self, store: Store) -> None:
        size = 3 * mmap.PAGESIZE
        view = store.allocate(size)
        assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
        assert len(view) >= size
        assert bytes(view) == bytes(len(view))
        assert _address(view) % mmap.PAGESIZE == 0

    def test_allocated_memory_takes_and_gives_values(self, store: Store) -> None:
        keys = fresh_keys(2)
        slots = Slots(store.allocate(8192), 4096, [1, 0], [4096, 100])
        values = [content(key, size) for key, size in zip(keys, slots.sizes, strict=True)]
        for i, value in enumerate(values):
            slots.value(i)[:] = value
        assert store.put(keys, slots) == 2
        slots.view[:] = bytes(len(slots.view))
        assert store.get(keys, slots) == 2
        assert_values([bytes(slots.value(i)) for i in range(2)], values)

    def test_a_store_says_where_it_is_and_what_it_promises(self, store: Store) -> None:
        assert "://" in store.label
        assert isinstance(store.lease_s, float)
        assert 0 <= store.lease_s < 1e9


def _address(view: memoryview) -> int:
    import torch

    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
