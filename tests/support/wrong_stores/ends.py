"""Stores that are wrong under threads, under pressure, or at their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.store.base import Lifecycle, Slots, check_call
from tests.support.wrong_stores.base import SmallWrongStore, WrongStore


class ShowsAShortBlock(WrongStore):
    caught_by = ("test_a_value_appears_whole_or_not_at_all",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        for i, key in enumerate(keys):
            if key not in self._shelf.values:
                self._shelf.add(key, self._begun(bytes(slots.value(i))))
                time.sleep(0.002)  # as long as a disk takes for the rest
                self._shelf.drop([key])
        return super().put(keys, slots)

    def _begun(self, value: bytes) -> bytes:
        return value[: len(value) // 2]


class ShowsHalfABlock(ShowsAShortBlock):
    def _begun(self, value: bytes) -> bytes:
        return super()._begun(value).ljust(len(value), b"\0")


class MixesTwoWriters(WrongStore):
    caught_by = ("test_two_writers_of_one_key_are_not_mixed",)

    def __init__(self) -> None:
        super().__init__()
        self._halves: dict[tuple[BlockKey, int], bytes] = {}

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        for i, key in enumerate(keys):
            value = bytes(slots.value(i))
            middle = len(value) // 2
            if self._halves.setdefault((key, 0), value[:middle]) == value[:middle]:
                time.sleep(0.001)  # as long as a disk takes for the first half
            second = self._halves.setdefault((key, 1), value[middle:])
            self._shelf.add(key, self._halves[key, 0] + second)
        return len(keys)


class ConfusesThreads(WrongStore):
    caught_by = ("test_many_threads_get_what_they_ask_for",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._keys = keys
        time.sleep(0)  # another thread's turn
        n = super().get(self._keys[: len(keys)], slots)
        time.sleep(0.0005)
        return n if self._keys is keys else super().get(self._keys[: len(keys)], slots)


class ClaimsALease(SmallWrongStore):
    caught_by = ("test_a_leased_value_survives_pressure", "test_the_pool_key_survives_pressure")

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        values = self._shelf.values
        while values and len(values) > 20:
            self._shelf.drop([next(iter(values))])
        return super().put(keys, slots)


class MiscountsWhenFull(SmallWrongStore):
    caught_by = ("test_store_full_counts_what_was_stored",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        try:
            return super().put(keys, slots)
        except StoreError:
            return len(keys)


class MakesRoomOneByOne(SmallWrongStore):
    caught_by = ("test_room_is_made_for_all_values_or_nothing_goes",)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        while self._shelf.values and not super().make_room(keys, sizes):
            self._shelf.drop([next(iter(self._shelf.values))])
        return super().make_room(keys, sizes)


class MakesRoomOfMarkers(SmallWrongStore):
    caught_by = ("test_room_is_made_for_all_values_or_nothing_goes",)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        has_room = super().make_room(keys, sizes)
        if has_room:
            self._shelf.drop([key for key in self._shelf.values if kind_of(key) is Kind.HANDOFF])
        return has_room


class SaysThatThereIsRoom(SmallWrongStore):
    caught_by = ("test_room_is_made_for_all_values_or_nothing_goes",)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        return sum(sizes) <= (self.room().capacity_bytes or 0)


class UsesTheFirstFirst(SmallWrongStore):
    caught_by = ("test_after_a_use_the_last_values_go_first",)

    def use(self, keys: Sequence[BlockKey]) -> None:
        super().use(keys[::-1])


class HasNoUse(WrongStore):
    """Implements `EvictsByUse` as it was before it had `use`."""

    caught_by = ("test_a_store_that_evicts_when_asked_has_all_calls_for_it",)
    use = None  # type: ignore[assignment]


class HangsOnClose(WrongStore):
    caught_by = (
        "test_a_store_that_was_never_used_closes",
        "test_close_under_load_ends_and_so_do_the_calls",
    )

    def close(self) -> None:
        threading.Event().wait(3)


class WorksAfterClose(WrongStore):
    caught_by = ("test_calls_after_close_raise_store_closed",)

    def close(self) -> None:
        pass


class ClosesOnce(WrongStore):
    caught_by = ("test_calls_after_close_raise_store_closed",)

    def close(self) -> None:
        self._lifecycle.check()
        super().close()


class BreaksOnClose(WrongStore):
    caught_by = ("test_calls_after_close_raise_store_closed",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        if self._lifecycle.is_closed:
            raise RuntimeError("the connection is gone")
        return super().match(keys)


class LivesOnInAForkedChild(WrongStore):
    caught_by = ("test_a_forked_child_is_refused_and_harms_nobody",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        if self._lifecycle.is_closed:
            self._lifecycle = Lifecycle(self.label)
        return super().match(keys)
