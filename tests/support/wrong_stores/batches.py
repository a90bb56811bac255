"""Stores that are wrong about batches: prefixes, keys and arguments."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdstore.errors import StoreError, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, check_call
from tests.support.wrong_stores.base import WrongStore, stem_of


class MatchesPastAGap(WrongStore):
    caught_by = ("test_the_first_gap_ends_an_answer_and_hides_no_other_value",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        check_call(keys)
        return sum(self._shelf.lease(key, time.monotonic()) for key in keys)


class SaysMinusOneForAMiss(WrongStore):
    caught_by = ("test_the_first_gap_ends_an_answer_and_hides_no_other_value",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return super().get(keys, slots) or -1


class SaysOneTooMany(WrongStore):
    caught_by = ("test_every_user_of_the_pool_gets_what_was_put",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return super().put(keys, slots) + 1


class GetsPastAGap(WrongStore):
    caught_by = ("test_the_first_gap_ends_an_answer_and_hides_no_other_value",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        return sum(self._get_one(key, slots, i) for i, key in enumerate(keys))


class GetsAllOrNothing(WrongStore):
    caught_by = ("test_the_first_gap_ends_an_answer_and_hides_no_other_value",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        n = super().get(keys, slots)
        return n if n == len(keys) else 0


class StopsAtItsWindow(WrongStore):
    caught_by = ("test_a_batch_may_have_2000_keys",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        return min(super().match(keys), 512)


class DropsWhatIsBehindAGap(WrongStore):
    caught_by = ("test_put_of_stored_keys_accepts_them_and_keeps_their_bytes",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        for i, key in enumerate(keys):
            if key in self._shelf.values:
                break
            self._put_one(key, slots, i)
        return len(keys)


class RenamesKeys(WrongStore):
    """Takes some keys for the same."""

    def match(self, keys: Sequence[BlockKey]) -> int:
        check_call(keys)
        now = time.monotonic()
        found = (i for i, key in enumerate(keys) if not self._shelf.lease(self._name(key), now))
        return next(found, len(keys))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        found = (i for i, k in enumerate(keys) if not self._get_one(self._name(k), slots, i))
        return next(found, len(keys))

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        return sum(self._put_one(self._name(key), slots, i) for i, key in enumerate(keys))

    def _name(self, key: BlockKey) -> BlockKey:
        return key


class TruncatesKeys(RenamesKeys):
    caught_by = ("test_keys_that_differ_only_at_their_end_are_different",)

    def _name(self, key: BlockKey) -> BlockKey:
        return BlockKey(key[:128])


class ForgetsThatTailsHaveLengths(RenamesKeys):
    caught_by = ("test_keys_that_differ_only_at_their_end_are_different",)

    def _name(self, key: BlockKey) -> BlockKey:
        return stem_of(key)


class RaisesOnAMiss(WrongStore):
    caught_by = (
        "test_missing_keys_are_a_miss",
        "test_the_first_gap_ends_an_answer_and_hides_no_other_value",
    )

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        n = super().get(keys, slots)
        if n < len(keys):
            raise StoreError(f"{keys[n]} is missing", num_done=n)
        return n


class FailsOnNothing(WrongStore):
    caught_by = ("test_an_empty_batch_is_zero",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        if not keys:
            raise StoreUnavailable("wrong number of arguments")
        return super().match(keys)


class TakesKeysTwice(WrongStore):
    caught_by = ("test_a_key_given_twice_is_refused",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return sum(self._put_one(key, slots, i) for i, key in enumerate(keys))


class TakesAnyText(WrongStore):
    caught_by = ("test_what_is_no_key_is_refused",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        if len(set(keys)) < len(keys):
            raise ValueError("distinct")
        found = (i for i, key in enumerate(keys) if not self._shelf.lease(key, 0.0))
        return next(found, len(keys))


class TakesSlotsOutsideTheBuffer(WrongStore):
    caught_by = ("test_slots_that_do_not_fit_are_refused",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys)
        for i, key in enumerate(keys):
            self._shelf.add(key, bytes(slots.value(i)))
        return len(keys)
