"""Values: stored whole and unchanged, with the caller's memory left alone."""

from __future__ import annotations

import secrets
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
)

SIZE = 4096


class ValueTests:
    """One thread's view of single values."""

    def write_raw(self, store: Store, key: BlockKey, data: bytes) -> None:
        """Plants a value behind the store's back; override it where that is possible."""
        pytest.skip("this store's suite has no `write_raw`")

    def test_put_then_get_returns_the_same_bytes(self, store: Store) -> None:
        keys = fresh_keys(5)
        values = [content(key, SIZE) for key in keys]
        assert put(store, keys, values) == 5
        assert_values(get(store, keys, [SIZE] * 5), values)

    def test_another_user_of_the_pool_gets_what_was_put(self, store: Store, peer: Store) -> None:
        keys = fresh_keys(3)
        values = [content(key, SIZE) for key in keys]
        put(store, keys, values)
        assert peer.match(keys) == 3
        assert_values(get(peer, keys, [SIZE] * 3), values)

    def test_a_stored_key_keeps_its_bytes(self, store: Store) -> None:
        keys = fresh_keys(2)
        first = [content(key, SIZE) for key in keys]
        put(store, keys, first)
        put(store, keys, [content(key, SIZE, version=1) for key in keys])
        assert_values(get(store, keys, [SIZE] * 2), first)

    def test_a_stored_key_keeps_its_length(self, store: Store) -> None:
        keys = fresh_keys(1)
        first = [content(key, SIZE) for key in keys]
        put(store, keys, first)
        put(store, keys, [content(key, SIZE // 2, version=1) for key in keys])
        assert_values(get(store, keys, [SIZE]), first)

    def test_put_of_stored_keys_accepts_them_all(self, store: Store) -> None:
        keys = fresh_keys(6)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[1:4], values[1:4])
        assert put(store, keys, values) == 6
        assert put(store, keys, values) == 6
        assert_values(get(store, keys, [SIZE] * 6), values)

    def test_put_does_not_keep_the_callers_memory(self, store: Store) -> None:
        keys = fresh_keys(2)
        values = [content(key, SIZE) for key in keys]
        slots = filled_slots(values)
        store.put(keys, slots)
        slots.view[:] = b"\0" * len(slots.view)
        assert_values(get(store, keys, [SIZE] * 2), values)

    def test_get_does_not_lend_the_stores_memory(self, store: Store) -> None:
        keys = fresh_keys(2)
        values = [content(key, SIZE) for key in keys]
        put(store, keys, values)
        slots = empty_slots([SIZE] * 2)
        store.get(keys, slots)
        slots.view[:] = b"\0" * len(slots.view)
        assert_values(get(store, keys, [SIZE] * 2), values)

    def test_values_may_have_odd_sizes(self, store: Store) -> None:
        sizes = [1, 2, 3, 63, 64, 65, 4095, 4097, 65535, 65536, 65537, 262143, 262145, 300001]
        keys = fresh_keys(len(sizes))
        values = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert put(store, keys, values) == len(sizes)
        assert_values(get(store, keys, sizes), values)

    def test_values_may_have_4_mib(self, store: Store) -> None:
        keys, size = fresh_keys(5), 4 << 20
        values = [content(key, size) for key in keys]
        assert put(store, keys, values) == 5
        assert_values(get(store, keys, [size] * 5), values)

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

    def test_markers_are_values_like_any(self, store: Store) -> None:
        stem = f"pds1:{secrets.token_hex(16)}:handoff:{secrets.token_hex(16)}"
        keys = [BlockKey(f"{stem}:0:{state}") for state in ("started", "done", "failed")]
        assert store.match(keys) == 0
        put(store, keys, [content(key, 64) for key in keys])
        assert store.match(keys) == 3

    @pytest.mark.parametrize("asked", [1, SIZE - 1, SIZE + 1, 2 * SIZE, 300_000])
    def test_a_value_of_another_length_raises_wrong_length(self, store: Store, asked: int) -> None:
        keys = fresh_keys(1)
        put(store, keys, [content(keys[0], SIZE)])
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

    def test_a_planted_value_of_the_right_length_is_read(self, store: Store) -> None:
        keys = fresh_keys(1)
        value = content(keys[0], SIZE)
        self.write_raw(store, keys[0], value)
        assert store.match(keys) == 1
        assert_values(get(store, keys, [SIZE]), [value])

    @pytest.mark.parametrize("where", range(4))
    def test_wrong_length_counts_the_values_before_it(self, store: Store, where: int) -> None:
        keys = fresh_keys(4)
        values = [content(key, SIZE) for key in keys]
        put(store, keys, values)
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

    def test_remove_forgets_what_was_put(self, store: Store) -> None:
        keys = fresh_keys(3)
        put(store, keys, [content(key, SIZE) for key in keys])
        store.remove(keys)
        assert [store.match([key]) for key in keys] == [0, 0, 0]
        assert_values(get(store, keys, [SIZE] * 3), [])

    def test_remove_forgets_a_leased_value(self, store: Store) -> None:
        keys = fresh_keys(2)
        put(store, keys, [content(key, SIZE) for key in keys])
        assert store.match(keys) == 2
        store.remove(keys[:1])
        assert store.match(keys) == 0
        assert store.match(keys[1:]) == 1

    def test_remove_of_missing_keys_is_fine(self, store: Store) -> None:
        keys = fresh_keys(3)
        put(store, keys[1:2], [content(keys[1], SIZE)])
        store.remove(keys)
        store.remove(keys)
        assert store.match(keys[1:2]) == 0

    def test_remove_leaves_other_keys(self, store: Store) -> None:
        keys = fresh_keys(3)
        tail = BlockKey(f"{keys[1]}:partial:3")
        values = [content(key, SIZE) for key in (*keys, tail)]
        put(store, [*keys, tail], values)
        store.remove([keys[1]])
        rest = [keys[0], keys[2], tail]
        assert_values(get(store, rest, [SIZE] * 3), [values[0], values[2], values[3]])

    def test_a_removed_key_takes_new_bytes(self, store: Store) -> None:
        keys = fresh_keys(1)
        put(store, keys, [content(keys[0], SIZE)])
        store.remove(keys)
        new = content(keys[0], SIZE, version=1)
        assert put(store, keys, [new]) == 1
        assert_values(get(store, keys, [SIZE]), [new])
