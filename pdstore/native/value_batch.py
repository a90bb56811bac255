"""ValueBatch: values of an arena and their block copies, in one call of the library for all."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_void_p
from typing import NamedTuple

from pdstore.native.abi import Error, Values, raise_error
from pdstore.native.arena import NativeArena
from pdstore.native.engine import Engine, Ticket
from pdstore.native.slot_arrays import SlotArrays

_PATIENCE_NS = 20_000_000  # for the arena's lock; a job that ends waits for these calls


class ValueBatch(NamedTuple):
    """Values of an arena, and the copies between them and a paged cache.

    names: the keys, a zero after each.
    sizes: int64 each, headers included.
    starts: the first 56 bytes of each value, side by side.
    engine: makes the copies.
    items, ids: the copies, packed as `Engine.submit` takes them; their payloads are set here.
    ready: a CUDA event's handle that the copies wait for; 0: for nothing.
    """

    names: bytes
    sizes: bytes
    starts: bytes
    engine: Engine
    items: bytes
    ids: bytes
    ready: int = 0

    @property
    def num_values(self) -> int:
        """The number of values."""
        return len(self.sizes) // 8

    def fill(
        self, arena: NativeArena, memory: int, kinds: bytes, rest_s: float | None = None
    ) -> tuple[SlotArrays, bool] | None:
        """Reserves slots for the values that are not stored, gathers into them and seals them.

        memory: the address where this process maps the arena's values.
        kinds: of the values, as `NativeArena.reserve` takes them.
        rest_s: also publish them, and return so many seconds later; None: do not.
        Returns a slot for each value, -1 where it was stored, and whether all are published.
        Returns None, and has done nothing, if a value has no room or the lock is not free soon.
        Raises LayoutError or SwapError.
        """
        arrays, is_published, error = SlotArrays(self.num_values), c_int32(), Error()
        rest_ns = -1 if rest_s is None else int(rest_s * 1e9)
        with self.engine.lent() as engine:
            code = arena.library.calls.pds_arena_fill(
                arena.handle,
                engine,
                byref(self._values(memory)),
                kinds,
                rest_ns,
                *arrays.all,
                byref(is_published),
                byref(error),
            )
        raise_error(error)
        return None if code else (arrays, bool(is_published.value))

    def take(self, arena: NativeArena, memory: int) -> tuple[SlotArrays, Ticket] | None:
        """Borrows and verifies the values and starts to scatter them.

        Returns their slots and the copy, which the caller waits for. Returns None, and copies
        nothing, if a value is missing or wrong or the lock is not free soon. Raises LayoutError or
        SwapError.
        """
        arrays, handle, error = SlotArrays(self.num_values), c_void_p(), Error()
        out = byref(handle), byref(error)
        with self.engine.lent() as engine:
            code = arena.library.calls.pds_arena_take(
                arena.handle, engine, byref(self._values(memory)), *arrays.all, *out
            )
        raise_error(error)
        return None if code else (arrays, Ticket(arena.library, handle))

    def _values(self, memory: int) -> ctypes.Structure:
        return Values(
            keys=self.names,
            sizes=self.sizes,
            starts=self.starts,
            items=self.items,
            ids=self.ids,
            count=self.num_values,
            num_ids=len(self.ids) // 8,
            memory=memory,
            ready=self.ready,
            lock_ns=_PATIENCE_NS,
        )
