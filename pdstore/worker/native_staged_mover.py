"""NativeStagedMover: moves values through staging; one call of the library reads or writes a share.

Such a call also verifies or seals the values, so that no Python runs for a value of a full block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.block import HEADER_BYTES
from pdstore.native.engine import Ticket
from pdstore.native.library import address_of
from pdstore.outcome import Direction, Reason
from pdstore.store.base import Slots
from pdstore.store.checked import count_of
from pdstore.store.optional import SealingWriter, VerifyingReader
from pdstore.worker.block_range import Split
from pdstore.worker.job import ChildJob
from pdstore.worker.mover import BAD, Ends
from pdstore.worker.staged_mover import Arrived, StagedMover
from pdstore.worker.staging import Staging
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.swap.native import NativeSwap, Packed
from pdstore.worker.value_run import ValueRun
from pdstore.worker.values import Value, keys_of
from pdstore.worker.verified import Verified


class NativeStagedMover(StagedMover):
    """Gathers in one call and seals and writes in another; reads and verifies, and then scatters.

    What is not read right is read again by `StagedMover`, which says why. Tails and values of
    layouts with windows are packed one by one.

    swap, reader, writer: the swap and the store of `ends`.
    """

    def __init__(
        self,
        ends: Ends,
        swap: NativeSwap,
        reader: VerifyingReader,
        writer: SealingWriter,
        staging: Staging,
        split: Split,
        removed: frozenset[Reason] = BAD,
    ) -> None:
        super().__init__(ends, staging, split, removed)
        self._native_swap, self._verifier, self._sealer = swap, reader, writer
        self._base = address_of(staging.view) + HEADER_BYTES

    def _at_hand(self, window: Sequence[Value]) -> Sequence[Value]:
        return window

    def _sizes_of(self, window: Sequence[Value]) -> Sequence[int]:
        if isinstance(window, ValueRun):
            sizes = window.packed.sizes(window.first, window.stop)
            return memoryview(sizes).cast("q").tolist()
        return super()._sizes_of(window)

    def _gather(self, window: Sequence[Value], slots: Slots, ready: ReadyEvent | None) -> None:
        if isinstance(window, ValueRun):
            self._native_swap.finish(self._submit(Direction.SAVE, window, slots, ready))
        else:
            super()._gather(window, slots, ready)

    def _put(self, child: ChildJob, window: Sequence[Value], slots: Slots) -> bool:
        keys, engine = keys_of(window), self._native_swap.engine
        with child.in_store_call():
            answer = self._sealer.put_sealed(keys, slots, _starts_of(window), engine)
            accepted = count_of(answer, keys, self._store)
            self._count("saved", window[:accepted])
        return accepted == len(window)

    def _take(
        self,
        child: ChildJob,
        window: Sequence[Value],
        numbers: Sequence[int],
        first_token: int,
        ready: ReadyEvent | None,
        arrived: Arrived,
    ) -> Verified:
        if isinstance(window, ValueRun) and not self._begins_within(window, first_token):
            slots = self._slots(numbers, self._sizes_of(window))
            if self._is_read(child, window, slots):
                arrived(window, partial(self._start, window, slots, ready))
                return Verified(len(window))
        return super()._take(child, window, numbers, first_token, ready, arrived)

    def _is_read(self, child: ChildJob, run: ValueRun, slots: Slots) -> bool:
        """Fills the slots; False if not all values are there and right."""
        keys, starts, engine = keys_of(run), _starts_of(run), self._native_swap.engine
        with child.in_store_call():
            try:
                answer = self._verifier.get_right(keys, slots, starts, engine)
            except StoreError:  # the other way meets it too, and tells it
                return False
            return count_of(answer, keys, self._store) == len(keys)

    def _start(self, run: ValueRun, slots: Slots, ready: ReadyEvent | None) -> Callable[[], None]:
        """Starts to scatter values; returns what waits for the end."""
        ticket = self._submit(Direction.LOAD, run, slots, ready)
        return partial(self._native_swap.finish, ticket)

    def _submit(
        self, direction: Direction, run: ValueRun, slots: Slots, ready: ReadyEvent | None
    ) -> Ticket:
        """Starts the copies between the paged cache and the slots, all in one call."""
        swap, part = self._native_swap, (run.first, run.stop)
        items = array("Q", swap.pack_items(run.packed, *part))
        payloads = [self._base + number * slots.slot_bytes for number in slots.numbers]
        items[:: len(items) // len(run)] = array("Q", payloads)  # an item begins with its payload
        packed = Packed(items.tobytes(), run.packed.ids(*part))
        return swap.submit(direction, packed, ready=swap.handle_of(ready))


def _starts_of(values: Sequence[Value]) -> bytes:
    """Returns the first bytes of values, side by side."""
    if isinstance(values, ValueRun):
        return values.packed.starts(values.first, values.stop)
    return b"".join([value.start for value in values])
