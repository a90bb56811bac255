"""One caller: what `match`, `get`, `put` and `remove` promise for values and for batches."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pdstore.errors import WrongLength
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
    stored,
)

SIZE = 4096
SMALL = 256
ODD_SIZES = [1, 2, 3, 63, 64, 65, 4095, 4097, 65535, 65536, 65537, 262143, 262145, 300001]

Verb = Callable[[Store, Sequence[BlockKey]], object]

_VERBS: dict[str, Verb] = {
    "match": lambda store, keys: store.match(keys),
    "get": lambda store, keys: store.get(keys, empty_slots([SMALL] * len(keys))),
    "put": lambda store, keys: store.put(keys, filled_slots([b"x" * SMALL] * len(keys))),
    "remove": lambda store, keys: store.remove(keys),
}
every_verb = pytest.mark.parametrize("verb", _VERBS.values(), ids=_VERBS)


class CallTests:
    """Values come back whole and unchanged; every result is "the first n".

    A missing key is a number, a bad argument a ValueError, and the caller's memory its own.
    """

    def write_raw(self, store: Store, key: BlockKey, data: bytes) -> None:
        """Plants a value behind the store's back; override it where that is possible."""
        pytest.skip("this store's suite has no `write_raw`")

    def test_another_user_of_the_pool_gets_what_was_put(self, store: Store, peer: Store) -> None:
        keys, values = stored(store, 3, SIZE)
        assert peer.match(keys) == 3
        assert_values(get(peer, keys, [SIZE] * 3), values)

    @pytest.mark.parametrize("size", [SIZE, SIZE // 2])
    def test_a_stored_key_keeps_its_bytes(self, store: Store, size: int) -> None:
        keys, first = stored(store, 2, SIZE)
        put(store, keys, [content(key, size, version=1) for key in keys])
        assert_values(get(store, keys, [SIZE] * 2), first)

    def test_put_of_stored_keys_accepts_them_all(self, store: Store) -> None:
        keys = fresh_keys(6)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[1:4], values[1:4])
        assert put(store, keys, values) == 6
        assert put(store, keys, values) == 6
        assert_values(get(store, keys, [SIZE] * 6), values)

    def test_the_callers_memory_is_its_own(self, store: Store) -> None:
        keys = fresh_keys(2)
        values = [content(key, SIZE) for key in keys]
        slots = filled_slots(values)
        for call in (store.put, store.get):
            call(keys, slots)
            slots.view[:] = b"\0" * len(slots.view)
            assert_values(get(store, keys, [SIZE] * 2), values)

    @pytest.mark.parametrize("sizes", [ODD_SIZES, [4 << 20] * 5], ids=["odd", "4 MiB"])
    def test_values_may_have_any_size(self, store: Store, sizes: list[int]) -> None:
        keys = fresh_keys(len(sizes))
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert put(store, keys, values) == len(sizes)
        assert_values(get(store, keys, sizes), values)

    def test_the_ith_value_goes_with_the_ith_slot(self, store: Store) -> None:
        keys, numbers = fresh_keys(4), [6, 0, 3, 1]
        view = memoryview(bytearray(8 * SIZE))
        slots = Slots(view, SIZE, numbers, [SIZE, 100, SIZE - 1, 7])
        values = [content(key, size) for key, size in zip(keys, slots.sizes, strict=True)]
        for i, value in enumerate(values):
            slots.value(i)[:] = value
        store.put(keys, slots)
        assert_values(get(store, keys, slots.sizes), values)
        back = replace(slots, view=memoryview(bytearray(8 * SIZE)), numbers=[2, 7, 0, 5])
        assert store.get(keys, back) == 4
        assert_values([bytes(back.value(i)) for i in range(4)], values)

    def test_get_writes_nothing_outside_the_sizes(self, store: Store) -> None:
        keys, sizes = fresh_keys(3), [1, 100, SIZE - 1]
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        put(store, keys, values)
        slots = replace(empty_slots(sizes, slot_bytes=SIZE), numbers=[2, 0, 1])
        store.get(keys, slots)
        expected = filled_slots([values[1], values[2], values[0]], slot_bytes=SIZE)
        assert bytes(slots.view) == bytes(expected.view)

    def test_put_stores_exactly_the_sizes(self, store: Store) -> None:
        keys, sizes = fresh_keys(2), [1, 100]
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        store.put(keys, filled_slots(values, slot_bytes=SIZE))
        assert_values(get(store, keys, sizes), values)
        with pytest.raises(WrongLength):
            store.get(keys, empty_slots([SIZE, SIZE]))

    def test_keys_that_differ_only_at_their_end_are_different(self, store: Store) -> None:
        stem = ("pds1:" + secrets.token_hex(16) + ":0:0:").ljust(MAX_KEY_CHARS - 1, "f")
        keys = [BlockKey(stem + last) for last in "0123456789abcdef"] + [BlockKey(stem)]
        values = [content(key, 64) for key in keys]
        put(store, keys, values)
        assert_values(get(store, keys, [64] * len(keys)), values)

    def test_a_tail_is_not_its_block(self, store: Store) -> None:
        [block] = fresh_keys(1)
        tails = [f"{block}:partial:{n}" for n in (1, 10, 11, 63)]
        keys = [BlockKey(key) for key in (block, *tails)]
        values = [content(key, 64) for key in keys]
        put(store, keys[:2], values[:2])
        assert store.match(keys[2:]) == 0
        put(store, keys[2:], values[2:])
        assert_values(get(store, keys, [64] * 5), values)

    @pytest.mark.parametrize("asked", [1, SIZE - 1, SIZE + 1, 2 * SIZE, 300_000])
    def test_a_value_of_another_length_raises_wrong_length(self, store: Store, asked: int) -> None:
        keys, _ = stored(store, 1, SIZE)
        with pytest.raises(WrongLength):
            store.get(keys, empty_slots([asked]))

    @pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1])
    def test_a_planted_value_of_another_length_raises_wrong_length(
        self, store: Store, length: int
    ) -> None:
        keys = fresh_keys(1)
        self.write_raw(store, keys[0], b"x" * length)
        with pytest.raises(WrongLength):
            store.get(keys, empty_slots([SIZE]))

    @pytest.mark.parametrize("where", range(4))
    def test_wrong_length_counts_the_values_before_it(self, store: Store, where: int) -> None:
        keys, values = stored(store, 4, SIZE)
        slots = empty_slots([SIZE + (i == where) for i in range(4)])
        with pytest.raises(WrongLength) as caught:
            store.get(keys, slots)
        assert caught.value.num_done == where
        assert_values([bytes(slots.value(i)) for i in range(where)], values[:where])

    def test_a_gap_ends_a_get_before_a_value_of_another_length(self, store: Store) -> None:
        keys = fresh_keys(3)
        first, last = (content(key, SIZE) for key in keys[::2])
        put(store, keys[::2], [first, last[:-1]])
        assert_values(get(store, keys, [SIZE] * 3), [first])

    def test_remove_heals_a_wrong_length(self, store: Store) -> None:
        keys = fresh_keys(3)
        values = [content(key, SIZE) for key in keys]
        put(store, keys, [values[0], values[1][:-1], values[2]])
        with pytest.raises(WrongLength):
            get(store, keys, [SIZE] * 3)
        store.remove(keys[1:2])
        assert_values(get(store, keys, [SIZE] * 3), values[:1])
        put(store, keys, values)
        assert_values(get(store, keys, [SIZE] * 3), values)

    def test_remove_forgets_leased_values_and_no_others(self, store: Store) -> None:
        keys, _ = stored(store, 3, SIZE)
        tail = BlockKey(f"{keys[1]}:partial:3")
        put(store, [tail], [b"x"])
        assert store.match(keys) == 3
        store.remove(keys[:2])
        assert [store.match([key]) for key in (*keys, tail)] == [0, 0, 1, 1]
        assert_values(get(store, keys, [SIZE] * 3), [])

    def test_remove_of_missing_keys_is_fine(self, store: Store) -> None:
        keys = fresh_keys(3)
        put(store, keys[1:2], [content(keys[1], SIZE)])
        store.remove(keys)
        store.remove(keys)
        assert store.match(keys[1:2]) == 0

    def test_a_removed_key_takes_new_bytes(self, store: Store) -> None:
        keys, _ = stored(store, 1, SIZE)
        store.remove(keys)
        new = content(keys[0], SIZE, version=1)
        assert put(store, keys, [new]) == 1
        assert_values(get(store, keys, [SIZE]), [new])

    @pytest.mark.parametrize("gap", range(6))
    def test_a_call_stops_at_the_first_gap(self, store: Store, gap: int) -> None:
        keys = fresh_keys(6)
        values = [content(key, SMALL) for key in keys]
        put(store, keys[:gap] + keys[gap + 1 :], values[:gap] + values[gap + 1 :])
        assert store.match(keys) == gap
        assert_values(get(store, keys, [SMALL] * 6), values[:gap])

    def test_values_behind_a_gap_are_there(self, store: Store) -> None:
        keys = fresh_keys(6)
        values = [content(key, SMALL) for key in keys]
        put(store, keys[3:], values[3:])
        assert store.match(keys[3:]) == 3
        assert_values(get(store, keys[3:], [SMALL] * 3), values[3:])
        put(store, keys[:3], values[:3])
        assert_values(get(store, keys, [SMALL] * 6), values)

    def test_match_of_many_keys_stops_at_the_first_gap(self, store: Store) -> None:
        keys = fresh_keys(700)
        put(store, keys, [b"x"] * 700)
        assert store.match(keys) == 700
        for gap in (1, 31, 32, 33, 63, 64, 128, 159, 160, 161, 511, 671, 672, 699):
            store.remove([keys[gap]])
            assert store.match(keys) == gap
            put(store, [keys[gap]], [b"x"])

    def test_a_batch_may_have_2000_keys(self, store: Store) -> None:
        keys, values = stored(store, 2000, SMALL)
        assert store.match(keys) == 2000
        assert_values(get(store, keys, [SMALL] * 2000), values)

    def test_an_empty_batch_is_zero(self, store: Store) -> None:
        nothing = empty_slots([])
        assert (store.match([]), store.get([], nothing), store.put([], nothing)) == (0, 0, 0)
        store.remove([])

    def test_batches_may_be_any_sequences(self, store: Store) -> None:
        keys = tuple(fresh_keys(3))
        slots = Slots(memoryview(bytearray(3 * SMALL)), SMALL, range(2, -1, -1), (SMALL,) * 3)
        assert store.put(keys, slots) == 3
        assert store.match(keys) == 3
        assert store.get(keys, replace(slots, numbers=(0, 1, 2))) == 3
        store.remove(keys)

    @every_verb
    def test_a_key_given_twice_is_refused(self, store: Store, verb: Verb) -> None:
        keys = fresh_keys(3)
        put(store, keys, [b"x" * SMALL] * 3)
        with pytest.raises(ValueError, match="distinct"):
            verb(store, [*keys, keys[1]])

    @every_verb
    @pytest.mark.parametrize(
        "bad", ["", "a/b", "/a", "a/", ".", "..", ".a", "a\nb", "a\0b", "\u00fc", "k" * 201]
    )
    def test_what_is_no_key_is_refused(self, store: Store, verb: Verb, bad: str) -> None:
        keys = fresh_keys(2)
        with pytest.raises(ValueError, match="bad block key"):
            verb(store, [keys[0], BlockKey(bad), keys[1]])

    @pytest.mark.parametrize(
        "change",
        [
            {"numbers": [0]},
            {"sizes": [SMALL]},
            {"sizes": [SMALL, 0]},
            {"sizes": [SMALL, SMALL + 1]},
            {"sizes": [SMALL, -1]},
            {"numbers": [0, 2]},
            {"numbers": [0, -1]},
        ],
        ids=str,
    )
    def test_slots_that_do_not_fit_are_refused(
        self, store: Store, change: dict[str, list[int]]
    ) -> None:
        keys = fresh_keys(2)
        good = filled_slots([b"x" * SMALL] * 2)
        bad = Slots(
            good.view, SMALL, change.get("numbers", [0, 1]), change.get("sizes", [SMALL, SMALL])
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
