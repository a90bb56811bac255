"""Listing a pool: all of it is shown, nothing else, and looking changes nothing."""

from __future__ import annotations

import secrets

import pytest

from pdstore.errors import StoreClosed
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.optional import ALL_KEYS, ListsValues, StoredValue, TellsRoom
from pdstore.testing.values import content, fresh_keys, put

_MANY = 1500


class ListTests:
    """For stores that list what they keep (`ListsValues`); skipped for others."""

    @pytest.fixture
    def lists(self, store: Store) -> ListsValues:
        found = find_optional(store, ListsValues)
        if found is None:
            pytest.skip("this store does not list its values")
        return found

    def test_a_listing_has_every_value_once(
        self, store: Store, peer: Store, lists: ListsValues
    ) -> None:
        keys = fresh_keys(_MANY)
        put(store, keys[:700], [b"x"] * 700)
        put(peer, keys[700:], [b"x"] * (_MANY - 700))
        assert sorted(value.key for value in _listed(lists, keys)) == keys

    def test_a_listing_says_what_a_value_takes(self, store: Store, lists: ListsValues) -> None:
        keys, sizes = fresh_keys(3), [64, 5000, 200_000]
        put(store, keys, [content(key, size) for key, size in zip(keys, sizes, strict=True)])
        taken = {value.key: value.num_bytes for value in _listed(lists, keys)}
        for key, size in zip(keys, sizes, strict=True):
            assert size <= taken[key] <= 2 * size + 4096

    def test_a_values_exact_length_is_told(self, store: Store, lists: ListsValues) -> None:
        present, missing = fresh_keys(2)
        put(store, [present], [bytes(5001)])
        assert lists.length_of(present) == 5001
        assert lists.length_of(missing) is None

    def test_a_listing_says_how_long_ago_a_value_was_used(
        self, store: Store, lists: ListsValues
    ) -> None:
        keys = fresh_keys(2)
        put(store, keys, [b"x", b"y"])
        for value in _listed(lists, keys):
            assert value.age_s is None or 0 <= value.age_s < 60

    def test_a_listing_has_only_keys_with_the_prefix(
        self, store: Store, lists: ListsValues
    ) -> None:
        ours, others = fresh_keys(3), fresh_keys(3)
        put(store, [*ours, *others], [b"x"] * 6)
        assert {value.key for value in _listed(lists, ours)} == set(ours)
        assert {*ours, *others} <= {value.key for value in lists.stored_values()}
        for prefix in ("pds1:*", f"pds1:[{secrets.token_hex(1)}]", ours[0] + "?"):
            assert list(lists.stored_values(prefix)) == []

    def test_a_listing_has_tails_and_markers_too(self, store: Store, lists: ListsValues) -> None:
        stem = f"pds1:{secrets.token_hex(16)}:"
        keys = [BlockKey(stem + end) for end in ("0:0:a", "0:0:b:partial:3", "handoff:c:0:done")]
        put(store, keys, [b"x"] * 3)
        assert {value.key for value in lists.stored_values(stem)} == set(keys)

    def test_a_removed_value_is_not_listed(self, store: Store, lists: ListsValues) -> None:
        keys = fresh_keys(2)
        put(store, keys, [b"x", b"y"])
        store.remove(keys[:1])
        assert [value.key for value in _listed(lists, keys)] == keys[1:]

    def test_a_listing_after_close_raises_store_closed(
        self, store: Store, lists: ListsValues
    ) -> None:
        store.close()
        with pytest.raises(StoreClosed):
            list(lists.stored_values())

    def test_the_room_holds_what_is_stored(self, store: Store) -> None:
        tells = find_optional(store, TellsRoom)
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


def _listed(lists: ListsValues, keys: list[BlockKey]) -> list[StoredValue]:
    """Returns what is listed of the namespace of keys that `fresh_keys` made."""
    return list(lists.stored_values(ALL_KEYS + keys[0].split(":")[1] + ":"))
