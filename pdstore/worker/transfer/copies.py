"""SwapCopies: the block copies of a `Swap`, in the form that transfers use."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat

from pdstore.errors import Direction
from pdstore.format import block
from pdstore.format.geometry import Geometry
from pdstore.format.keys import Part
from pdstore.native.engine import Ticket
from pdstore.native.library import address_of
from pdstore.store.base import Slots
from pdstore.store.transfer import Move, ReadyEvent
from pdstore.worker.swap.base import BlockCopy, Swap
from pdstore.worker.swap.native import NativeSwap


class SwapCopies:
    """Copies between the paged cache and slots, by any `Swap`.

    native: the same copies by libpdstore; None if the swap makes them by torch.
    """

    def __init__(self, geometry: Geometry, swap: Swap) -> None:
        self._geometry = geometry
        self._swap = swap
        self.native = SwapNativeCopies(geometry, swap) if isinstance(swap, NativeSwap) else None

    def device_event_or_wait(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if the device can wait for it; else waits for it and returns None."""
        return self._swap.device_event_or_wait(ready)

    def start(self, direction: Direction, move: Move, slots: Slots) -> Callable[[], None]:
        """Starts the copies; returns a function that waits for them. Raises as a swap does."""
        if self.native is not None:
            return self.native.start(direction, move, slots)
        payloads = [slots.value(i)[block.HEADER_BYTES :] for i in range(len(move.values))]
        columns = *_columns(self._geometry, move), payloads
        copies = [BlockCopy(*fields) for fields in zip(*columns, strict=True)]
        if direction is Direction.LOAD:
            return self._swap.start_scatter(copies, move.ready)
        return partial(self._swap.gather, copies, move.ready)

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        """Returns the checksum of each value's payload."""
        return self._swap.checksums(values)


class SwapNativeCopies:
    """The block copies of a native swap, also for calls of the library that make them.

    engine: the library's engine, which makes the copies.
    """

    def __init__(self, geometry: Geometry, swap: NativeSwap) -> None:
        self.engine = swap.engine
        self._geometry = geometry
        self._swap = swap

    def start(self, direction: Direction, move: Move, slots: Slots) -> Callable[[], None]:
        """Starts copies between the paged cache and slots, behind the values' headers."""
        base = address_of(slots.view) + block.HEADER_BYTES
        payloads = [base + number * slots.slot_bytes for number in slots.numbers]
        packed = self.pack(move, payloads[: len(move.values)])
        ready = self._swap.handle_of(move.ready)
        return partial(self.finish, self._swap.submit(direction, packed, ready=ready))

    def pack(self, move: Move, payloads: Sequence[int] | None = None) -> tuple[bytes, bytes]:
        """Returns the copies of a move as the library's items and block ids.

        payloads: the address of each value's payload; None if the library's call sets them.
        """
        values = move.values
        addresses = repeat(0, len(values)) if payloads is None else payloads
        parts, block_ids, num_cells, before = _columns(self._geometry, move)
        lengths = map(len, block_ids)
        items = self._swap.pack_items(addresses, parts, num_cells, before, lengths)
        return items, array("q", chain.from_iterable(block_ids)).tobytes()

    def handle_of(self, ready: ReadyEvent | None) -> int:
        """Returns the handle of a CUDA event; waits for any other event and returns 0."""
        return self._swap.handle_of(ready)

    def finish(self, ticket: Ticket) -> None:
        """Waits for a copy without a timeout: the device may use the payloads until its end."""
        self._swap.finish(ticket)


def _columns(
    geometry: Geometry, move: Move
) -> tuple[Sequence[Part], Sequence[Sequence[int]], Sequence[int], Sequence[int]]:
    """Returns each copy's part, block ids, cells and first cell, a column for each."""
    values = move.values
    return values.parts, values.block_ids, values.num_cells, move.cells_before(geometry)
