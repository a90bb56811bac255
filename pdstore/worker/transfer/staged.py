"""StagedTransfer: moves values through slots of staging, over get and put of any store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from pdstore.errors import Direction, LayoutError, Reason, StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.values import Values
from pdstore.native.engine import Engine
from pdstore.store.base import Slots, count_of
from pdstore.store.optional import Promotes
from pdstore.store.reading import Read, read_values
from pdstore.store.transfer import (
    Loaded,
    Move,
    Sealer,
    Shortfall,
    Split,
    Transfer,
    TransferContext,
    Turn,
    moved_by,
)
from pdstore.threads import Deadline
from pdstore.worker.transfer.staging import Staging

SealedCall = Callable[[Sequence[BlockKey], Slots, bytes, Engine], int]
"""A call of `Sealer`."""


class StagedTransfer(Transfer):
    """Moves values through host slots that it borrows from staging.

    A turn holds at most two windows of slots: one window that is being filled, and one whose copy
    runs. It waits for slots only while it holds none, so that no two jobs wait for each other.

    split: a window, whose values are read, verified and copied together, is about one range of it.
    sealer: the store, if its library seals, reads and verifies values; None: Python does.
    Raises LayoutError when a block's parts do not fit staging.
    """

    def __init__(
        self,
        context: TransferContext,
        staging: Staging,
        split: Split,
        sealer: Sealer | None = None,
    ) -> None:
        self.split = split
        self.memory = staging.memory
        self._context = context
        self._copy = context.copies.start
        self._staging = staging
        self._sealer = sealer
        self._promoter = context.store.optional(Promotes) if context.promotes else None
        self._num_parts = len(context.geometry.parts)
        largest = staging.largest_loan // 2
        if self._num_parts > largest:
            raise LayoutError(
                f"a block has {self._num_parts} parts on this rank and staging has"
                f" {staging.num_slots} slots: raise PDSTORE_STAGING"
            )
        window = -(-split.range_bytes // staging.slot_bytes)
        self._window = max(self._num_parts, min(window, largest))

    @contextlib.contextmanager
    def slots(self, turn: Turn, sizes: Sequence[int], least: int = 1) -> Iterator[Slots]:
        with self._lend(turn, len(sizes), least, turn.deadline) as numbers:
            yield self._slots(numbers, sizes)

    def save(
        self, turn: Turn, moves: Sequence[Move], on_captured: Callable[[], None]
    ) -> Reason | None:
        for move in moves:
            rest = move.values
            while rest:
                with self.slots(turn, rest.sizes) as slots:
                    if not len(slots):
                        turn.raise_if_over()
                        return Reason.NO_SLOTS
                    window, rest = rest[: len(slots)], rest[len(slots) :]
                    with turn.copying():
                        self._copy(Direction.SAVE, move._replace(values=window), slots)()
                    if not rest:
                        on_captured()
                    if not move.put(partial(self._put, turn, window, slots)):
                        return Reason.STORE_ERROR
        return None

    def load_window(
        self, turn: Turn, move: Move, on_loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        with contextlib.ExitStack() as held:
            values = move.values
            numbers = self._lend_beside_a_copy(turn, held, len(values))
            if not numbers:
                turn.raise_if_over()
                return Shortfall(Reason.NO_SLOTS), values
            window = values[: values.num_whole(len(numbers))]
            slots = self._slots(numbers, window.sizes)
            read = self._read(turn, window, slots)
            usable = window[: window.num_whole(read.num_right)]
            if usable:
                held.enter_context(turn.copying())
                wait = self._copy(Direction.LOAD, move._replace(values=usable), slots)
                copied = partial(on_loaded, usable, None)
                turn.finish_copy(partial(_finish, held.pop_all(), wait, copied))
                self._promote(turn, usable, slots)
        return read.shortfall, values[len(window) :]

    def _put(self, turn: Turn, values: Values, slots: Slots) -> bool:
        """Seals and stores gathered values; returns False if the store did not take all of them."""
        context = self._context
        keys = values.keys
        if self._sealer is None:
            self._seal(values, slots)
            put = partial(context.store.put, keys, slots)
        else:
            put = partial(self._call_sealer, "put", self._sealer.put_sealed, values, slots)
        with turn.in_store_call():
            accepted = count_of(put(), keys, context.store)
            context.count_saved(values.num_counted[:accepted])
        return accepted == len(values)

    def _seal(self, values: Values, slots: Slots) -> None:
        """Writes the headers, with checksums, of values whose payloads are in the slots already."""
        views = [slots.value(i) for i in range(len(values))]
        for prefix, view in zip(values.header_prefixes, views, strict=True):
            view[: block.START_BYTES] = prefix
        for view, computed in zip(views, self._context.copies.checksums(views), strict=True):
            block.write_checksum(view, computed)

    def _read(self, turn: Turn, values: Values, slots: Slots) -> Read:
        """Reads values into the slots in one call of the library; if that fails, step by step."""
        if self._sealer is not None:
            with turn.in_store_call(), contextlib.suppress(StoreError):  # the steps raise it again
                answer = self._call_sealer("get", self._sealer.get_right, values, slots)
                if count_of(answer, values.keys, self._context.store) == len(values):
                    return Read(len(values))
        return read_values(self._context, turn, values, slots)

    def _promote(self, turn: Turn, values: Values, slots: Slots) -> None:
        """Lets the store take values up that it has found below, while they are being copied.

        Their slots are held until the turn has finished that copy, which only reads them. The load
        does not need it, so an error of it is none of the load.
        """
        if self._promoter is not None:
            with contextlib.suppress(StoreError), turn.in_store_call():
                self._promoter.promote(values.keys, slots.part(0, len(values)))

    def _call_sealer(self, verb: str, call: SealedCall, values: Values, slots: Slots) -> int:
        native = self._context.copies.native
        assert native is not None  # else there is no sealer
        prefixes = b"".join(values.header_prefixes)

        def sealed(keys: Sequence[BlockKey], slots: Slots) -> int:
            return call(keys, slots, prefixes, native.engine)

        moved = partial(moved_by, sealed, values.keys, slots)
        return self._context.call(verb, values.keys, moved).answer

    def _lend_beside_a_copy(self, turn: Turn, held: contextlib.ExitStack, most: int) -> list[int]:
        """Lends slots for whole blocks; finishes the running copy before it waits for slots."""
        if turn.has_copy_under_way:
            at_once = self._lend(turn, most, self._num_parts, Deadline(0.0))
            if numbers := held.enter_context(at_once):
                return numbers
            turn.finish_copy()
        deadline = turn.deadline if turn.may_wait else Deadline(0.0)
        return held.enter_context(self._lend(turn, most, self._num_parts, deadline))

    def _lend(
        self, turn: Turn, most: int, least: int, deadline: Deadline
    ) -> AbstractContextManager[list[int]]:
        return self._staging.loan(
            turn.direction,
            min(most, self._window),
            least=least,
            deadline=deadline,
            is_over=lambda: turn.is_over,
        )

    def _slots(self, numbers: Sequence[int], sizes: Sequence[int]) -> Slots:
        staging = self._staging
        count = min(len(numbers), len(sizes))
        return Slots(staging.view, staging.slot_bytes, numbers[:count], sizes[:count])


def _finish(
    held: contextlib.ExitStack, wait: Callable[[], None], copied: Callable[[], None]
) -> None:
    """Waits for copies, calls `copied`, and gives back what the copies held."""
    with held:
        wait()
        copied()
