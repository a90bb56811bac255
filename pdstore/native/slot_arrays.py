"""SlotArrays: slots of an arena in arrays that libpdstore fills."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64
from typing import Any


class SlotArrays:
    """The slots of some values as the library knows them: numbers, generations, offsets."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots = (c_int64 * count)()
        self.generations = (c_uint64 * count)()
        self.offsets = (c_int64 * count)()

    @property
    def all(self) -> tuple[ctypes.Array[Any], ...]:
        """The three arrays, in the order of the library's arguments."""
        return self.slots, self.generations, self.offsets

    def of(self, indices: Sequence[int]) -> SlotArrays:
        """Returns a copy of the slots at these indices."""
        chosen = SlotArrays(len(indices))
        chosen.slots[:] = [self.slots[i] for i in indices]
        chosen.generations[:] = [self.generations[i] for i in indices]
        chosen.offsets[:] = [self.offsets[i] for i in indices]
        return chosen
