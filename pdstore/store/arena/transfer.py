"""ArenaTransfer: saves and loads by copies between the paged cache and an arena's own memory."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from pdstore.errors import JobError, Reason, StoreError, StoreTimeout
from pdstore.format import block
from pdstore.format.values import Values
from pdstore.native.arena import Filled, ValueBatch
from pdstore.native.engine import Ticket
from pdstore.store.base import Slots
from pdstore.store.reading import read_values
from pdstore.store.transfer import (
    HostMemory,
    Loaded,
    Move,
    Moved,
    NativeCopies,
    Shortfall,
    Split,
    Transfer,
    TransferContext,
    Turn,
)

_CHECK_INTERVAL_S = 0.05
_MAX_TRIES = 3


class ArenaCalls(Protocol):
    """The calls of `ArenaStore` that copy between the paged cache and the arena's memory."""

    def fill(self, batches: Sequence[ValueBatch]) -> Filled: ...

    def start_scatter(self, batch: ValueBatch) -> Ticket | None: ...

    def confirm(self, copies: Ticket) -> tuple[int, int]: ...


def split_of(range_bytes: int) -> Split:
    """Returns the split for copies in an arena's memory, which run little Python code."""
    return Split(range_bytes, 1, at_once=8, num_workers=4, most_woken=1, early_ranges=2)


class ArenaTransfer(Transfer):
    """Saves by gathering blocks into an arena's memory; loads by scattering from its values there.

    A save stores several ranges in one call of the library; a load begins one window in one call.
    If a call cannot save all values, even after room was made, the save goes on block by block. If
    a call cannot load them, they are copied to private memory to find which is wrong or missing. Or
    they pass through staging, if values that the arena lacks may be elsewhere.

    A value may be evicted while a load copies from it. So after the copy the arena is asked which
    values are still stored, and which were right when copied: a value counts if it is both.

    memory: the arena's memory, which is being registered with the device; jobs wait for that.
    """

    def __init__(
        self,
        context: TransferContext,
        copies: NativeCopies,
        arena: ArenaCalls,
        memory: HostMemory,
    ) -> None:
        self.split = split_of(context.range_bytes)
        self.memory = memory
        self._context = context
        self._copies = copies
        self._arena = arena
        largest = block.HEADER_BYTES + context.geometry.largest_payload_bytes
        turn_bytes = self.split.at_once * self.split.range_bytes
        self._window = max(len(context.geometry.parts), -(-turn_bytes // largest))
        self._staged: Transfer | None = None
        if context.may_lie_elsewhere:
            self._staged = context.staged(context, Split(context.range_bytes), None)

    @contextlib.contextmanager
    def slots(self, turn: Turn, sizes: Sequence[int], least: int = 1) -> Iterator[Slots]:
        some = sizes[: max(least, self._window)]
        view = memoryview(bytearray(len(some) * max(some)))
        yield Slots(view, max(some), range(len(some)), some)

    def save(
        self, turn: Turn, moves: Sequence[Move], on_captured: Callable[[], None]
    ) -> Reason | None:
        _wait_for_memory(turn, self.memory)
        try:
            self._fill(turn, moves)
        except StoreError as error:
            self._fill_again(turn, moves, error)
        for _ in moves:
            on_captured()
        return None

    def load_window(
        self, turn: Turn, move: Move, on_loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        _wait_for_memory(turn, self.memory)
        values = move.values
        window = values[: values.num_whole(min(self._window, len(values)))]
        rest = values[len(window) :]
        shortfall = None
        for _ in range(_MAX_TRIES):
            if not window or self._begins(turn, move._replace(values=window), on_loaded):
                return shortfall, rest
            if self._staged is not None:
                _wait_for_memory(turn, self._staged.memory)
                return self._staged.load_window(turn, move, on_loaded)
            with self.slots(turn, window.sizes, len(window)) as slots:
                found = read_values(self._context, turn, window, slots)
            if found.num_right < len(window):
                shortfall = found.shortfall
                window = window[: window.num_whole(found.num_right)]
        return Shortfall(Reason.LOST), rest

    def _fill(self, turn: Turn, moves: Sequence[Move]) -> None:
        """Stores all values in one call, which waits while others hold the arena's lock."""
        batches = [self._batch(move) for move in moves]
        keys = [key for move in moves for key in move.values.keys]
        counted = [number for move in moves for number in move.values.num_counted]

        def fill() -> Moved[Filled]:
            filled = self._arena.fill(batches)
            return Moved(filled, len(filled.indices), filled.num_bytes, filled.error)

        while True:
            with turn.copying(), turn.in_store_call():
                filled = self._context.call("put", keys, fill).answer
            self._context.count_saved([counted[i] for i in filled.indices])
            if filled.error is None:
                return
            if not isinstance(filled.error, StoreTimeout):
                raise filled.error
            with turn.in_store_call():  # a match waits for the lock, outside `copying`
                self._context.store.match(moves[0].values.keys)

    def _fill_again(self, turn: Turn, moves: Sequence[Move], error: StoreError) -> None:
        """Stores all values in one call if room could be made, else block by block."""
        if moves[0].on_store_error(error):
            with contextlib.suppress(StoreError):
                self._fill(turn, moves)
                return
        for move in moves:
            for one in move.values.blocks():
                move.put(partial(self._fill, turn, [move._replace(values=one)]))

    def _begins(self, turn: Turn, move: Move, on_loaded: Loaded) -> bool:
        """Starts to scatter values; returns False if one is missing or wrong."""
        batch = self._batch(move)
        copies = None

        def scatter() -> Moved[Ticket | None]:
            ticket = self._arena.start_scatter(batch)
            if ticket is None:
                return Moved(None)
            return Moved(ticket, batch.num_values, batch.num_bytes)

        with contextlib.ExitStack() as held:
            held.enter_context(turn.copying())
            try:
                with turn.in_store_call():
                    copies = self._context.call("get", move.values.keys, scatter).answer
            except JobError:  # the job has ended: wait for the copies before raising
                if copies is not None:
                    self._copies.finish(copies)
                raise
            if copies is None:
                return False
            turn.finish_copy(partial(self._finish, turn, copies, move, on_loaded, held.pop_all()))
        return True

    def _finish(
        self,
        turn: Turn,
        copies: Ticket,
        move: Move,
        on_loaded: Loaded,
        held: contextlib.ExitStack,
    ) -> None:
        """Waits for copies; counts the values that were right and are still stored.

        If the first value that was not right when copied is still stored, it is corrupt. If other
        tiers may have what the copy did not bring, that is loaded from them.
        """
        values = move.values
        with held:
            self._copies.finish(copies)
            num_there, num_right = self._arena.confirm(copies)
            there = values[: values.num_whole(min(num_there, num_right))]
            reason = Reason.CORRUPT if num_right < num_there else Reason.LOST
            rest = values[len(there) :]
            may_be_below = self._staged is not None and not turn.is_over
            on_loaded(there, reason if rest and not may_be_below else None)
        if rest and may_be_below:
            self._load_elsewhere(turn, move._replace(values=rest), on_loaded)

    def _load_elsewhere(self, turn: Turn, move: Move, on_loaded: Loaded) -> None:
        """Loads through staging what a copy in place did not bring; says why if it falls short.

        It ends before the next copy in place is counted, since values count in their order.
        """
        assert self._staged is not None
        _wait_for_memory(turn, self._staged.memory)
        rest = move.values
        with turn.before_next_copy():
            while rest:
                missing, rest = self._staged.load_window(
                    turn, move._replace(values=rest), on_loaded
                )
                turn.finish_copy()
                if missing is not None:
                    on_loaded(rest[:0], missing.reason)
                    return

    def _batch(self, move: Move) -> ValueBatch:
        values = move.values
        items, block_ids = self._copies.pack(move)
        return ValueBatch(
            keys=values.keys,
            sizes=array("q", values.sizes).tobytes(),
            starts=b"".join(values.header_prefixes),
            engine=self._copies.engine,
            items=items,
            block_ids=block_ids,
            ready=self._copies.handle_of(move.ready),
        )


def _wait_for_memory(turn: Turn, memory: HostMemory) -> None:
    """Waits until memory is pinned. Raises the error of that, or JobError if the job ended."""
    while not memory.is_ready(_CHECK_INTERVAL_S):
        turn.raise_if_over()
