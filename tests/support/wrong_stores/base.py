"""WrongStore: a store that breaks the contract in one way."""

from __future__ import annotations

from typing import ClassVar

from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots
from pdstore.store.memory import MemoryStore


class WrongStore(MemoryStore):
    """Base of the wrong stores; `caught_by` names the tests that must fail one."""

    caught_by: ClassVar[tuple[str, ...]] = ()

    def _get_one(self, key: BlockKey, slots: Slots, i: int) -> int:
        return super().get([key], slots.part(i, i + 1))

    def _put_one(self, key: BlockKey, slots: Slots, i: int) -> int:
        return super().put([key], slots.part(i, i + 1))


class SmallWrongStore(WrongStore):
    """One with room for 24 values of `small_store`'s tests."""

    def __init__(self) -> None:
        super().__init__(budget=24 * 64 << 10)


def stem_of(key: BlockKey) -> BlockKey:
    return BlockKey(key.partition(":partial:")[0])
