"""ValueBatch: values of an arena and their block copies, in one call of the library for many."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
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

    def take(self, arena: NativeArena, memory: int) -> tuple[SlotArrays, Ticket] | None:
        """Borrows the values and starts to scatter them.

        Returns their slots and the copy, which the caller waits for and then asks for `num_right`.
        Returns None, and copies nothing, if a value is missing or seen to be wrong or the lock is
        not free soon. Raises LayoutError or SwapError.
        """
        arrays, handle, error = SlotArrays(self.num_values), c_void_p(), Error()
        out = byref(handle), byref(error)
        with self.engine.lent() as engine:
            code = arena.library.calls.pds_arena_take(
                arena.handle, engine, byref(self.values(memory)), *arrays.all, *out
            )
        raise_error(error)
        return None if code else (arrays, Ticket(arena.library, handle))

    def values(self, memory: int) -> ctypes.Structure:
        """Returns the batch as the library takes it; it must outlive what is returned.

        memory: the address where this process maps the arena's values.
        """
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


def fill(
    batches: Sequence[ValueBatch],
    arena: NativeArena,
    memory: int,
    kinds: bytes,
    rest_s: float = 0.0,
) -> tuple[list[int], bool]:
    """Stores the values of all batches: reserves, gathers, seals and publishes.

    A batch is published when its copies have ended, in the order given.

    batches: at least one; of one engine.
    memory: the address where this process maps the arena's values.
    kinds: of all batches' values, as `NativeArena.reserve` takes them.
    rest_s: time to sleep at the end.
    Returns the indices of the values that were stored now, and True; or those of the first batches,
    and False, if a value has no room or the lock is not free soon. Raises LayoutError or SwapError.
    """
    counts = [batch.num_values for batch in batches]
    arrays, num_done, error = SlotArrays(sum(counts)), c_int64(), Error()
    values = (Values * len(batches))(*(batch.values(memory) for batch in batches))
    with batches[0].engine.lent() as engine:
        code = arena.library.calls.pds_arena_fill(
            arena.handle,
            engine,
            values,
            len(batches),
            kinds,
            int(rest_s * 1e9),
            *arrays.all,
            byref(num_done),
            byref(error),
        )
    raise_error(error)
    stored = arrays.slots[: sum(counts[: num_done.value])]
    return [i for i, slot in enumerate(stored) if slot >= 0], not code
