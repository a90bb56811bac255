"""Tests of what only some stores promise: leases, eviction from a full store, and listings."""

from __future__ import annotations

import math
import secrets
import time

import pytest

from pdstore.errors import StoreClosed, StoreFull
from pdstore.format.keys import POOL_ID_KEY, PURGE_PREFIX, BlockKey
from pdstore.store.base import Store
from pdstore.store.optional import (
    ALL_KEYS,
    EvictsByUse,
    ListsValues,
    StoredValue,
    TellsRemovals,
    TellsRoom,
)
from pdstore.testing.values import (
    assert_stored,
    assert_values,
    content,
    contents,
    fresh_keys,
    get,
    put,
    put_new,
)

SIZE = 64 << 10
MOST = 64  # maximum number of values that `small_store` may have room for


class PressureTests:
    """A full store raises StoreFull or evicts values; it never evicts values that are leased."""

    @pytest.fixture
    def small_store(self) -> Store:
        """A store with room for 16 to 64 values of 64 KiB; override it."""
        pytest.skip("this store's suite has no `small_store`")

    def test_a_leased_value_survives_pressure(self, small_store: Store) -> None:
        keys = fresh_keys(6)
        values = contents(keys, SIZE)
        if not small_store.lease_s:  # without leases a value may be evicted, but never changed
            put(small_store, keys, values)
            _fill(small_store, 4 * MOST)
            found = get(small_store, keys, [SIZE] * 6)
            assert_values(found, values[: len(found)])
            return
        for _ in range(5):  # on a slow machine the leases may end before all values are read
            put(small_store, keys, values)
            leased_at = time.monotonic()
            assert small_store.match(keys) == 6
            _fill(small_store, 4 * MOST, until=leased_at + small_store.lease_s / 2)
            found = get(small_store, keys, [SIZE] * 6)
            if time.monotonic() - leased_at < small_store.lease_s:
                assert_values(found, values)
                return
        pytest.fail("too slow to tell")

    @pytest.mark.parametrize("count", [1, 8])
    def test_store_full_counts_what_was_stored(self, small_store: Store, count: int) -> None:
        stored = []
        for keys in (fresh_keys(count) for _ in range(4 * MOST // count)):
            done, is_full = _put_what_fits(small_store, keys)
            assert is_full == (done < count)
            found = small_store.match(keys)
            values = get(small_store, keys, [SIZE] * count)
            assert_values(values, contents(keys, SIZE)[: len(values)])
            if small_store.lease_s:
                assert found == len(values) == done, "nobody evicts what was put just now"
            stored += keys[:done]
        assert len(stored) >= 16
        assert 12 <= sum(small_store.match([key]) for key in stored) < 2 * MOST

    def test_a_full_store_still_serves(self, small_store: Store) -> None:
        keys, values = put_new(small_store, 2, SIZE)
        small_store.match(keys)
        _fill(small_store, MOST)
        assert small_store.match(fresh_keys(1)) == 0
        small_store.remove(keys[:1])
        assert small_store.match(keys) == 0
        assert put(small_store, keys[:1], values[:1]) == 1, "a removed value leaves its room"

    def test_a_value_larger_than_the_store_is_store_full(self, small_store: Store) -> None:
        keys = fresh_keys(1)
        with pytest.raises(StoreFull) as caught:
            put(small_store, keys, [content(keys[0], MOST * SIZE)])
        assert caught.value.num_done == 0
        assert small_store.match(keys) == 0

    def test_the_pool_key_survives_pressure(self, small_store: Store) -> None:
        value = content(POOL_ID_KEY, 64)
        small_store.remove([POOL_ID_KEY])
        put(small_store, [POOL_ID_KEY], [value])
        _fill(small_store, 4 * MOST)
        assert small_store.match([POOL_ID_KEY]) == 1
        assert_stored(small_store, [POOL_ID_KEY], [value])
        small_store.remove([POOL_ID_KEY])

    def test_purge_numbers_survive_pressure_and_clear(self, small_store: Store) -> None:
        namespace = secrets.token_hex(16)
        numbers = [BlockKey(f"{PURGE_PREFIX}{namespace}:{n}") for n in (7, 8)]
        put(small_store, numbers, contents(numbers, 64))
        _fill(small_store, 4 * MOST)
        small_store.clear(namespace)
        assert small_store.match(numbers) == 2
        assert_stored(small_store, numbers, contents(numbers, 64))
        small_store.remove(numbers)

    def test_a_full_store_whose_values_are_leased_takes_markers_and_purge_numbers(
        self, small_store: Store
    ) -> None:
        if not small_store.lease_s:
            pytest.skip("this store has no leases")
        purge_number = BlockKey(f"{PURGE_PREFIX}{secrets.token_hex(16)}:1")
        _fill_with_leased(small_store)
        for key in (*_fresh_markers(40), purge_number):
            assert put(small_store, [key], [content(key, 64)]) == 1
            assert_stored(small_store, [key], [content(key, 64)])
        small_store.remove([purge_number])

    def test_room_is_made_for_all_values_or_nothing_goes(self, small_store: Store) -> None:
        """For stores that evict when asked (`EvictsByUse`); skipped for other stores."""
        by_use = small_store.optional(EvictsByUse)
        if by_use is None or not small_store.lease_s:
            pytest.skip("this store evicts nothing when asked, or has no leases")
        markers = _fresh_markers(2)
        put(small_store, markers, contents(markers, 64))
        leased = _fill_with_leased(small_store)
        new = fresh_keys(8)
        assert not by_use.make_room(fresh_keys(2 * MOST), [SIZE] * (2 * MOST))
        assert all(small_store.match([key]) for key in [*leased, *markers]), "nothing went in vain"
        assert by_use.make_room([leased[0], *new], [SIZE] * 9)
        there = [key for key in leased if small_store.match([key])]
        assert leased[0] in there, "the caller's own values stay"
        assert put(small_store, new, contents(new, SIZE)) == 8
        assert all(small_store.match([key]) for key in [*there, *new]), "there was room for all"
        assert_stored(small_store, markers, contents(markers, 64))

    def test_after_a_use_the_last_values_go_first(self, small_store: Store) -> None:
        """For stores that evict when asked (`EvictsByUse`); skipped for other stores."""
        by_use = small_store.optional(EvictsByUse)
        if by_use is None or not small_store.lease_s:
            pytest.skip("this store evicts nothing when asked, or has no leases")
        keys = _fill_with_leased(small_store)
        by_use.use(keys)
        assert by_use.make_room(fresh_keys(4), [SIZE] * 4)
        num_there = sum(small_store.match([key]) for key in keys)
        assert len(keys) // 2 < num_there < len(keys)
        assert small_store.match(keys) == num_there, "one of the first values went, not the last"

    def test_a_store_that_evicts_when_asked_has_all_calls_for_it(self, store: Store) -> None:
        """`use` came after the others; pdstore finds a protocol only if no call is missing."""
        names = "oldest_age_s", "make_room", "use"
        has = [name for name in names if callable(getattr(store, name, None))]
        if "oldest_age_s" not in has and "make_room" not in has:
            pytest.skip("this store evicts nothing when asked")
        missing = [name for name in names if name not in has]
        assert not missing, (
            f"the store lacks {missing} of pdstore.store.EvictsByUse, so pdstore makes none of its"
            " calls: every save may evict, and a hand-off finds no room where all is leased"
        )

    def test_what_is_gone_is_told_whoever_has_removed_it(
        self, store: Store, peer: Store, small_store: Store
    ) -> None:
        """For stores that tell which values are gone (`TellsRemovals`); skipped for others."""
        tells, told_when_full = (each.optional(TellsRemovals) for each in (store, small_store))
        if tells is None or told_when_full is None:
            pytest.skip("this store does not tell which values are gone")
        keys = fresh_keys(4)
        put(store, keys[:3], contents(keys[:3], 100))
        assert tells.which_removed(keys) == [False, False, False, True]
        peer.remove(keys[1:2])
        assert tells.which_removed([keys[1], keys[0]]) == [True, False]
        peer.clear(keys[0].split(":")[1])
        assert tells.which_removed(keys) == [True] * 4
        assert tells.which_removed([]) == []
        first = fresh_keys(2 * MOST)
        num_stored = sum(_put_what_fits(small_store, [key])[0] for key in first)
        gone = told_when_full.which_removed(first)
        assert any(gone)  # evicted, or never stored for want of room
        assert 0 < gone.count(False) <= num_stored

    def test_clear_leaves_room(self, small_store: Store) -> None:
        keys = fresh_keys(MOST)
        for key in keys:
            if _put_what_fits(small_store, [key]) != (1, False):
                break
            small_store.match([key])
        small_store.clear(keys[0].split(":")[1])
        assert [small_store.match([key]) for key in keys] == [0] * MOST
        assert _put_what_fits(small_store, keys[:8]) == (8, False)


class ListTests:
    """Tests of stores that list their values (`ListsValues`); skipped for other stores."""

    @pytest.fixture
    def lists(self, store: Store) -> ListsValues:
        found = store.optional(ListsValues)
        if found is None:
            pytest.skip("this store does not list its values")
        return found

    def test_a_listing_has_every_value_once(
        self, store: Store, peer: Store, lists: ListsValues
    ) -> None:
        keys = fresh_keys(1500)
        put(store, keys[:700], [b"x"] * 700)
        put(peer, keys[700:], [b"x"] * 800)
        assert sorted(value.key for value in _listed(lists, keys)) == keys
        store.remove(keys[:1])
        assert sorted(value.key for value in _listed(lists, keys)) == keys[1:]

    def test_a_listing_says_what_a_value_takes_and_when_it_was_used(
        self, store: Store, lists: ListsValues
    ) -> None:
        sizes = dict(zip(fresh_keys(3), [64, 5000, 200_000], strict=True))
        put(store, list(sizes), [content(key, size) for key, size in sizes.items()])
        listed = _listed(lists, list(sizes))
        assert len(listed) == 3
        for value in listed:
            assert sizes[value.key] <= value.num_bytes <= 2 * sizes[value.key] + 4096
            assert value.age_s is None or 0 <= value.age_s < 60

    def test_a_values_exact_length_is_told(self, store: Store, lists: ListsValues) -> None:
        present, missing = fresh_keys(2)
        put(store, [present], [bytes(5001)])
        assert (lists.length_of(present), lists.length_of(missing)) == (5001, None)

    def test_a_listing_has_all_keys_with_the_prefix_and_no_others(
        self, store: Store, lists: ListsValues
    ) -> None:
        others = fresh_keys(3)
        stem = f"pds1:{secrets.token_hex(16)}:"
        ours = [BlockKey(stem + end) for end in ("0:0:a", "0:0:b:partial:3", "handoff:c:0:done")]
        put(store, [*ours, *others], [b"x"] * 6)
        assert {value.key for value in lists.stored_values(stem)} == set(ours)
        assert {*ours, *others} <= {value.key for value in lists.stored_values()}
        for prefix in ("pds1:*", f"pds1:[{secrets.token_hex(1)}]", ours[0] + "?"):
            assert list(lists.stored_values(prefix)) == []

    def test_a_listing_after_close_raises_store_closed(
        self, store: Store, lists: ListsValues
    ) -> None:
        store.close()
        with pytest.raises(StoreClosed):
            list(lists.stored_values())

    def test_the_room_holds_what_is_stored(self, store: Store) -> None:
        tells = store.optional(TellsRoom)
        if tells is None:
            pytest.skip("this store does not tell how full it is")
        put(store, fresh_keys(1), [bytes(100_000)])
        room = tells.room()
        assert room.keeper
        assert room.policy
        assert room.used_bytes is None or room.used_bytes >= 100_000
        assert room.capacity_bytes is None or room.capacity_bytes >= (room.used_bytes or 0)
        store.close()
        with pytest.raises(StoreClosed):
            tells.room()


def _fill(store: Store, count: int, until: float = math.inf) -> None:
    """Puts `count` values of 64 KiB, even into a full store; stops early at the time `until`."""
    for key in fresh_keys(count):
        if time.monotonic() > until:
            return
        _put_what_fits(store, [key])


def _fill_with_leased(store: Store) -> list[BlockKey]:
    """Puts and leases values of 64 KiB until one finds no room; returns the keys of the others."""
    leased: list[BlockKey] = []
    for key in fresh_keys(2 * MOST):
        if _put_what_fits(store, [key]) != (1, False):
            break
        store.match([key])
        leased.append(key)
    return leased


def _fresh_markers(count: int) -> list[BlockKey]:
    stem = fresh_keys(1)[0].split(":")[1]
    return [BlockKey(f"pds1:{stem}:handoff:{number:032x}:0:failed") for number in range(count)]


def _put_what_fits(store: Store, keys: list[BlockKey]) -> tuple[int, bool]:
    """Puts values; returns how many the store took, and whether it raised StoreFull."""
    try:
        return put(store, keys, contents(keys, SIZE)), False
    except StoreFull as error:
        return error.num_done, True


def _listed(lists: ListsValues, keys: list[BlockKey]) -> list[StoredValue]:
    """Returns what the store lists of the namespace of `keys`, which `fresh_keys` made."""
    return list(lists.stored_values(ALL_KEYS + keys[0].split(":")[1] + ":"))
