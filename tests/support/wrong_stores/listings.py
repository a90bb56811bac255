"""Stores that list wrongly: too little, too much, or with an effect."""

from __future__ import annotations

from collections.abc import Iterator

from pdstore.format.keys import BlockKey
from pdstore.store.optional import ALL_KEYS, StoredValue
from tests.support.wrong_stores.base import WrongStore


class ListsThePage(WrongStore):
    caught_by = ("test_a_listing_has_every_value_once",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return iter(list(super().stored_values(prefix))[:1024])


class ListsTwice(WrongStore):
    caught_by = ("test_a_listing_has_every_value_once",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return iter([*super().stored_values(prefix), *super().stored_values(prefix)])


class ListsEverything(WrongStore):
    caught_by = ("test_a_listing_has_all_keys_with_the_prefix_and_no_others",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return super().stored_values()


class ListsBlocksOnly(WrongStore):
    caught_by = ("test_a_listing_has_all_keys_with_the_prefix_and_no_others",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return (value for value in super().stored_values(prefix) if value.key.count(":") == 4)


class ListsNoSizes(WrongStore):
    caught_by = ("test_a_listing_says_what_a_value_takes_and_when_it_was_used",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return (value._replace(num_bytes=0) for value in super().stored_values(prefix))


class RoundsLengths(WrongStore):
    caught_by = ("test_a_values_exact_length_is_told",)

    def length_of(self, key: BlockKey) -> int | None:
        length = super().length_of(key)
        return None if length is None else -(-length // 4096) * 4096


class ListsTimesForAges(WrongStore):
    caught_by = ("test_a_listing_says_what_a_value_takes_and_when_it_was_used",)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        return (value._replace(age_s=1.7e9) for value in super().stored_values(prefix))
