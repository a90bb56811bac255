"""InPlaceMover: moves values to and from a store's own memory; no processor copies a byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
from pdstore.store.base import Slots
from pdstore.store.checked import count_of, is_count
from pdstore.store.in_place import InPlace, Loan, Reservation
from pdstore.worker.block_range import Split
from pdstore.worker.child_job import ChildJob
from pdstore.worker.mapped_memory import MappedMemory
from pdstore.worker.mover import Ends, Loaded, Mover, Source
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import Value, whole_blocks
from pdstore.worker.verified import Verified, wrong_values

_LOOK_S = 0.05


class InPlaceMover(Mover):
    """Gathers into places that the store reserves, and scatters from where its values lie.

    A value may be evicted while it is copied from. So it is verified where it lies, and after the
    copy the store is asked which values have stayed: only those count.

    in_place: the store of `ends`.
    memory: its memory, which is being registered with the device; jobs wait for that.
    split: values that are reserved or borrowed together are about one range of it.
    """

    def __init__(self, ends: Ends, in_place: InPlace, memory: MappedMemory, split: Split) -> None:
        super().__init__(ends, memory, split)
        self._in_place, self._mapped = in_place, memory
        largest = block.HEADER_BYTES + ends.layout.largest_payload_bytes
        self._window = max(self._num_parts, -(-split.range_bytes // largest))

    def _save(self, child: ChildJob, source: Source, gathered: Callable[[], None]) -> Reason | None:
        rest, ready = source
        while rest:
            window = rest[: self._window]
            with contextlib.ExitStack() as undo:
                reservation = self._fill(child, undo, window, ready)
                covered = reservation.num_keys
                rest = rest[covered:]
                mine: Sequence[Value] = window
                if len(reservation) < len(window):
                    mine = [window[i] for i in reservation.missing]
                if not rest:
                    gathered()
                if not self._publish(child, mine, reservation):
                    return Reason.LOST
            if not covered:
                return Reason.STORE_ERROR
        return None

    def load(
        self,
        child: ChildJob,
        values: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None,
        loaded: Loaded,
    ) -> Reason | None:
        rest = values
        while rest:
            window = rest[: whole_blocks(rest, min(self._window, len(rest)))]
            rest = rest[len(window) :]
            read = self._take(child, window, first_token, ready, loaded)
            if read.error is not None:
                raise read.error
            if read.reason is not None:
                return read.reason
        return None

    def mark(self, child: ChildJob, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        keys, size = list(markers), block.HEADER_BYTES
        view = memoryview(bytearray(size * len(keys)))
        slots = Slots(view, size, range(len(keys)), [size] * len(keys))
        for i, header in enumerate(markers.values()):
            block.seal(slots.value(i), header)
        with child.in_store_call():
            self._store.put(keys, slots)
        return None if self.num_matched(child, keys) == len(keys) else Reason.LOST

    def mark_at_once(self, key: BlockKey, marker: block.Header) -> bool:
        value = bytearray(block.HEADER_BYTES)
        block.seal(memoryview(value), marker)
        try:
            return self._in_place.put_at_once(key, bytes(value))
        except StoreError:
            return False

    def _read_some(self, child: ChildJob, values: Sequence[Value]) -> tuple[int, Verified]:
        window = list(values[: self._window])
        with contextlib.ExitStack() as held:
            loan, read = self._borrow(child, held, window)
            return len(window), self._verify(child, window, loan.places.value, read)

    def _fill(
        self,
        child: ChildJob,
        undo: contextlib.ExitStack,
        window: Sequence[Value],
        ready: ReadyEvent | None,
    ) -> Reservation:
        """Reserves places for what is not stored, copies into them and seals them.

        undo: gives back what was not published.
        """
        self._wait_for_memory(child)
        window = list(window)
        keys, sizes = [value.key for value in window], [value.size for value in window]
        with child.in_store_call():
            reservation = self._in_place.reserve(keys, sizes)
            undo.callback(self._abandon, reservation)
        count_of(reservation.num_keys, keys, self._store)
        self._gather(child, [window[i] for i in reservation.missing], reservation, ready)
        return reservation

    def _take(
        self,
        child: ChildJob,
        window: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None,
        loaded: Loaded,
    ) -> Verified:
        """Borrows and verifies values and starts to scatter the whole blocks of those."""
        window = list(window)
        with contextlib.ExitStack() as held:
            loan, read = self._borrow(child, held, window)
            value_at = loan.places.value
            read = self._verify(child, window, value_at, read)
            usable = self._whole(window, read)
            if usable:

                def copied() -> None:
                    self._confirm(loan, usable, loaded)

                copies = self._copies_to(usable, value_at, first_token)
                start = partial(self._swap.start_scatter, copies, ready)
                self._scatter(child, start, copied, held.pop_all())
            return read

    def _wait_for_memory(self, child: ChildJob) -> None:
        """Waits until copies may use the memory. Raises why they cannot, or that the job ended."""
        while not self._mapped.is_ready(_LOOK_S):
            child.check()

    def _abandon(self, reservation: Reservation) -> None:
        with contextlib.suppress(StoreError):  # a store that is closed takes its places back itself
            self._in_place.abandon(reservation)

    def _gather(
        self,
        child: ChildJob,
        values: Sequence[Value],
        reservation: Reservation,
        ready: ReadyEvent | None,
    ) -> None:
        """Copies values into their places and seals them there."""
        value_at = reservation.places.value
        with child.copying():
            copies = [value.block_copy(value_at(i)) for i, value in enumerate(values)]
            self._swap.gather(copies, ready)
        self._seal(values, [value_at(i) for i in range(len(values))])

    def _publish(self, child: ChildJob, values: Sequence[Value], reservation: Reservation) -> bool:
        """Makes sealed values visible; False if the store has lost some of the places."""
        with child.in_store_call():
            answer = self._in_place.publish(reservation, len(reservation))
            published = count_of(answer, values, self._store)
            self._count("saved", values[:published])
        return published == len(values)

    def _borrow(
        self, child: ChildJob, held: contextlib.ExitStack, window: Sequence[Value]
    ) -> tuple[Loan, Verified]:
        """Borrows the values that are stored; `held` releases them."""
        self._wait_for_memory(child)
        keys, sizes = [value.key for value in window], [value.size for value in window]
        read = Verified(len(keys))
        with child.in_store_call():
            try:
                loan = self._in_place.borrow(keys, sizes)
            except StoreError as error:
                read = self._failed_read(error, keys)
                n = read.num_right
                loan = self._in_place.borrow(keys[:n], sizes[:n])
            held.callback(self._in_place.release, loan)
        found = count_of(len(loan), keys[: read.num_right], self._store)
        return loan, read if found == read.num_right else Verified(found, Reason.LOST)

    def _look_again(self, child: ChildJob, value: Value, reason: Reason) -> Reason:
        """Looks at a value alone: if its place was taken while it was read, it is lost, not wrong.

        Then another value's bytes were seen, and whoever saved this one again must not lose it.
        """
        with contextlib.ExitStack() as held:
            loan, read = self._borrow(child, held, [value])
            if not read.num_right:
                return read.reason or Reason.LOST
            view = loan.places.value
            wrong = wrong_values([value], view, self._swap.checksums([view(0)]))
            has_stayed = self._num_there(loan, [value]) == 1
            return wrong.get(0, Reason.LOST) if has_stayed else Reason.LOST

    def _confirm(
        self, loan: Loan, copied: Sequence[Value], loaded: Loaded, num_right: int | None = None
    ) -> None:
        """After a copy: counts the values whose bytes were theirs all the time.

        num_right: how many of the first were right when copied; None: all. The next one is damaged
        if it has stayed in its place.
        """
        num_there = self._num_there(loan, copied)
        num_right = len(copied) if num_right is None else num_right
        there = copied[: whole_blocks(copied, min(num_there, num_right))]
        reason = Reason.CORRUPT if num_right < num_there else Reason.LOST
        loaded(there, None if len(there) == len(copied) else reason)
        self._count("loaded", there)

    def _num_there(self, loan: Loan, values: Sequence[Value]) -> int:
        """Returns how many of some first values of a loan have stayed. Raises StoreError."""
        answer = self._in_place.still_there(loan)
        if is_count(answer, len(loan)):
            answer = min(answer, len(values))
        return count_of(answer, values, self._store)
