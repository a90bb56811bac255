"""Stores that are wrong about single values: their bytes, lengths, slots and removal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdstore.errors import StoreError, WrongLength
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, check_call
from tests.support.wrong_stores.base import WrongStore, stem_of


class KeepsTheCallersMemory(WrongStore):
    caught_by = ("test_put_does_not_keep_the_callers_memory",)

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[BlockKey, memoryview] = {}

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        for i, key in enumerate(keys):
            self._pieces.setdefault(key, slots.value(i))
        return super().put(keys, slots)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        n = super().get(keys, slots)
        for i in range(n):
            slots.value(i)[:] = self._pieces[keys[i]]
        return n


class Overwrites(WrongStore):
    caught_by = (
        "test_put_of_stored_keys_accepts_them_and_keeps_their_bytes",
        "test_two_writers_of_one_key_are_not_mixed",
    )

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        super().remove(keys)
        return super().put(keys, slots)


class RefusesWhatIsStored(WrongStore):
    caught_by = ("test_put_of_stored_keys_accepts_them_and_keeps_their_bytes",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        new = sum(key not in self._shelf.values for key in keys)
        super().put(keys, slots)
        return new


class IgnoresSlotNumbers(WrongStore):
    caught_by = ("test_the_ith_value_goes_with_the_ith_slot_and_no_byte_beside_it",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return super().get(keys, Slots(slots.view, slots.slot_bytes, range(len(keys)), slots.sizes))


class LooksBehindAGap(WrongStore):
    caught_by = ("test_a_gap_ends_a_get_before_a_value_of_another_length",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        for i, key in enumerate(keys):
            value = self._shelf.values.get(key)
            if value is not None and len(value.data) != slots.sizes[i]:
                raise WrongLength(f"{key} has another length", num_done=i)
        return super().get(keys, slots)


class ForgetsTheGroup(WrongStore):
    caught_by = ("test_a_large_state_lies_beside_the_small_values_of_its_block",)

    def match(self, keys: Sequence[BlockKey]) -> int:
        return super().match([_without_group(key) for key in keys])

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return super().get([_without_group(key) for key in keys], slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return sum(self._put_one(_without_group(key), slots, i) for i, key in enumerate(keys))


class StoresWholeSlots(WrongStore):
    caught_by = ("test_the_ith_value_goes_with_the_ith_slot_and_no_byte_beside_it",)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        sizes = [slots.slot_bytes] * len(keys)
        return super().put(keys, Slots(slots.view, slots.slot_bytes, slots.numbers, sizes))


class WritesBehindTheSize(WrongStore):
    caught_by = ("test_the_ith_value_goes_with_the_ith_slot_and_no_byte_beside_it",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        n = super().get(keys, slots)
        for i in range(n):
            start = slots.numbers[i] * slots.slot_bytes
            rest = slots.view[start + slots.sizes[i] : start + slots.slot_bytes]
            rest[:] = bytes(len(rest))
        return n


class ServesShortValues(WrongStore):
    caught_by = ("test_wrong_length_counts_the_values_before_it",)
    finds_short = False

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        for i, key in enumerate(keys):
            value = self._shelf.values.get(key)
            if value is None:
                return i
            if self.finds_short and len(value.data) < slots.sizes[i]:
                raise WrongLength(f"{key} is short", num_done=i)
            data = value.data[: slots.sizes[i]]
            slots.value(i)[: len(data)] = data
        return len(keys)


class CutsLongValues(ServesShortValues):
    finds_short = True


class CallsAWrongLengthAMiss(WrongStore):
    caught_by = ("test_wrong_length_counts_the_values_before_it",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        try:
            return super().get(keys, slots)
        except WrongLength as error:
            return error.num_done


class HidesHowFarItCame(WrongStore):
    caught_by = ("test_wrong_length_counts_the_values_before_it",)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        try:
            return super().get(keys, slots)
        except WrongLength as error:
            raise WrongLength(str(error)) from error


class ForgetsToForget(WrongStore):
    caught_by = ("test_a_removed_key_takes_new_bytes",)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        check_call(keys)


class RemovesTails(WrongStore):
    caught_by = ("test_remove_forgets_a_leased_value_and_no_other",)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        stored = list(self._shelf.values)
        super().remove(keys)
        super().remove([k for k in stored if stem_of(k) in keys and k not in keys])


class KeepsWhatIsLeased(WrongStore):
    caught_by = ("test_remove_forgets_a_leased_value_and_no_other",)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        now = time.monotonic() + 2  # beyond the moment for which a put alone keeps a value
        values = self._shelf.values
        super().remove([k for k in keys if k in values and values[k].kept_until < now])


class FailsToRemoveWhatIsMissing(WrongStore):
    caught_by = ("test_remove_of_missing_keys_is_fine",)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        if any(key not in self._shelf.values for key in keys):
            raise StoreError("nothing there")
        super().remove(keys)


class LendsDirtyMemory(WrongStore):
    caught_by = ("test_allocated_memory_is_zeroed_and_aligned_and_takes_values",)

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(b"\xaa" * num_bytes))


def _without_group(key: BlockKey) -> BlockKey:
    return BlockKey(key.replace(":1:0:", ":0:0:"))
