"""VerifyingMover: loads through staging; one call of the library reads and verifies a share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.block import HEADER_BYTES
from pdstore.native.library import address_of
from pdstore.outcome import Direction, Reason
from pdstore.store.base import Slots
from pdstore.store.checked import count_of
from pdstore.store.optional import VerifyingReader
from pdstore.worker.block_range import Split
from pdstore.worker.child_job import ChildJob
from pdstore.worker.mover import BAD, Ends, Verified
from pdstore.worker.staged_mover import Arrived, StagedMover
from pdstore.worker.staging import Staging
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.swap.native import NativeSwap, Packed
from pdstore.worker.value_run import ValueRun
from pdstore.worker.values import Value


class VerifyingMover(StagedMover):
    """Loads full blocks without Python for a value: one call reads them, and one scatters them.

    What that call does not find right is read again by `StagedMover`, which says why.

    swap, reader: the swap and the store of `ends`.
    """

    def __init__(
        self,
        ends: Ends,
        swap: NativeSwap,
        reader: VerifyingReader,
        staging: Staging,
        split: Split,
        removed: frozenset[Reason] = BAD,
    ) -> None:
        super().__init__(ends, staging, split, removed)
        self._native_swap, self._verifier = swap, reader
        self._base = address_of(staging.view) + HEADER_BYTES

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
            part = window.first, window.stop
            sizes = memoryview(window.packed.sizes(*part)).cast("q").tolist()
            slots = self._slots(numbers, sizes)
            if self._is_read(child, window, slots):
                arrived(window, partial(self._start, window, slots, ready))
                return Verified(len(window))
        return super()._take(child, window, numbers, first_token, ready, arrived)

    def _is_read(self, child: ChildJob, run: ValueRun, slots: Slots) -> bool:
        """Fills the slots; False if not all values are there and right."""
        part = run.first, run.stop
        keys, starts = run.packed.keys(*part), run.packed.starts(*part)
        with child.in_store_call():
            try:
                answer = self._verifier.get_right(keys, slots, starts, self._native_swap.engine)
            except StoreError:  # the other way meets it too, and tells it
                return False
            return count_of(answer, keys, self._store) == len(keys)

    def _start(self, run: ValueRun, slots: Slots, ready: ReadyEvent | None) -> Callable[[], None]:
        """Starts to scatter values; returns what waits for the end."""
        swap, part = self._native_swap, (run.first, run.stop)
        items = array("Q", swap.pack_items(run.packed, *part))
        payloads = [self._base + number * slots.slot_bytes for number in slots.numbers]
        items[:: len(items) // len(run)] = array("Q", payloads)  # an item begins with its payload
        packed = Packed(items.tobytes(), run.packed.ids(*part))
        ticket = swap.submit(Direction.LOAD, packed, ready=swap.handle_of(ready))
        return partial(swap.finish, ticket)
