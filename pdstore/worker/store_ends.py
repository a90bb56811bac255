"""StoreEnd: how values are moved to a store and back, through staging or in an arena's memory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

from pdstore.errors import Direction, JobError, LayoutError, Reason, StoreError, StoreTimeout
from pdstore.format import block
from pdstore.format.layout import Layout
from pdstore.native.arena import ValueBatch
from pdstore.native.engine import Ticket
from pdstore.native.library import address_of
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Slots, count_of
from pdstore.store.file.store import FileStore
from pdstore.store.optional import find_optional
from pdstore.threads import Deadline
from pdstore.worker.job import ChildJob, Shortfall
from pdstore.worker.reading import Ends, Read, read_values
from pdstore.worker.staging import PinnedMemory, Staging
from pdstore.worker.swap.base import BlockCopy, ReadyEvent
from pdstore.worker.swap.native import NativeSwap
from pdstore.worker.values import Split, Values

_LOOK_S = 0.05
_MOST_TRIES = 3

Loaded: TypeAlias = Callable[[Values, Reason | None], None]
"""Called after a copy with the loaded values, in whole blocks, and the reason if some are not."""


class Move(NamedTuple):
    """Values to be moved together.

    ready: an event that the copies wait for; a load reads the store without waiting for it.
    first_token: an index in the prompt; a load does not write the tokens before it.
    mends: for a save: takes the store's error; returns True if the put should be tried again.
    """

    values: Values
    ready: ReadyEvent | None
    first_token: int = 0
    mends: Callable[[StoreError], bool] = lambda _: False

    def tokens_before(self, layout: Layout) -> list[int]:
        """Returns for each value how many tokens of its block come before `first_token`.

        That is 0 for every block except the one that contains `first_token`.
        """
        first_block, before = divmod(self.first_token, layout.block_tokens)
        return [before if number == first_block else 0 for number in self.values.numbers]


class StoreEnd(ABC):
    """A way to move values between the paged cache and a store. The workers of jobs call it.

    split: how jobs are split for this way.
    memory: the host memory that copies use; copies wait until it is pinned.
    """

    split: Split
    memory: PinnedMemory

    @abstractmethod
    def slots(
        self, child: ChildJob, sizes: Sequence[int], least: int = 1
    ) -> AbstractContextManager[Slots]:
        """Lends slots for some leading values: for at least `least` of them, or for none."""

    @abstractmethod
    def save(
        self, child: ChildJob, moves: Sequence[Move], gathered: Callable[[], None]
    ) -> Reason | None:
        """Saves values, and waits for all copies. Returns why not all are saved, or None.

        The store may later lose values that it has taken. Raises StoreError.
        gathered: called for each move when its blocks have been copied out of the paged cache.
        """

    @abstractmethod
    def load_window(
        self, child: ChildJob, move: Move, loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        """Loads some leading values, in whole blocks: get, verify, scatter.

        The last copy may still run when it returns; `child.finish_copy` waits for that copy.
        loaded: called after each copy.
        Returns why some of the leading values are not loaded, or None; and the values after these.
        """


class StagedEnd(StoreEnd):
    """Moves values through host slots that it borrows from staging.

    A child job holds at most two windows of slots: one window that is being filled, and one whose
    copy runs. It waits for slots only while it holds none, so that no two jobs wait for each other.

    range_bytes: the approximate bytes of a block range. A window, whose values are read, verified
      and copied together, is about one range of the split.
    Raises LayoutError when a block's parts do not fit staging.
    """

    def __init__(self, ends: Ends, staging: Staging, range_bytes: int) -> None:
        self._native = ends.swap if isinstance(ends.swap, NativeSwap) else None
        self._files: FileStore | None = None  # set if the library seals, reads and verifies values
        if self._native is not None:
            self._files = find_optional(ends.store, FileStore)
        self.split = Split(range_bytes) if self._files is None else Split.of_files(range_bytes)
        self.memory = staging.memory
        self._staging = staging
        self._ends = ends
        self._num_parts = len(ends.layout.owned_parts)
        largest = staging.largest_loan // 2
        if self._num_parts > largest:
            raise LayoutError(
                f"a block has {self._num_parts} parts on this rank and staging has"
                f" {staging.num_slots} slots: raise PDSTORE_STAGING"
            )
        window = -(-self.split.range_bytes // staging.slot_bytes)
        self._window = max(self._num_parts, min(window, largest))
        self._base = address_of(staging.view) + block.HEADER_BYTES

    @contextlib.contextmanager
    def slots(self, child: ChildJob, sizes: Sequence[int], least: int = 1) -> Iterator[Slots]:
        with self._lend(child, len(sizes), least, child.job.deadline) as numbers:
            yield self._slots(numbers, sizes)

    def save(
        self, child: ChildJob, moves: Sequence[Move], gathered: Callable[[], None]
    ) -> Reason | None:
        for move in moves:
            rest = move.values
            while rest:
                with self.slots(child, rest.sizes) as slots:
                    if not len(slots):
                        child.raise_if_over()
                        return Reason.NO_SLOTS
                    window, rest = rest[: len(slots)], rest[len(slots) :]
                    with child.copying():
                        self._start(Direction.SAVE, move._replace(values=window), slots)()
                    if not rest:
                        gathered()
                    if not _mended(partial(self._put, child, window, slots), move):
                        return Reason.STORE_ERROR
        return None

    def load_window(
        self, child: ChildJob, move: Move, loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        with contextlib.ExitStack() as held:
            values = move.values
            numbers = self._lend_beside_a_copy(child, held, len(values))
            if not numbers:
                child.raise_if_over()
                return Shortfall(Reason.NO_SLOTS), values
            window = values[: values.num_whole(len(numbers))]
            slots = self._slots(numbers, window.sizes)
            read = self._read(child, window, slots)
            usable = window[: window.num_whole(read.num_right)]
            if usable:
                held.enter_context(child.copying())
                wait = self._start(Direction.LOAD, move._replace(values=usable), slots)
                copied = partial(loaded, usable, None)
                child.finish_copy(partial(_finish, held.pop_all(), wait, copied))
                self._ends.count_tokens("loaded", usable.num_counted)
        return read.shortfall, values[len(window) :]

    def _put(self, child: ChildJob, values: Values, slots: Slots) -> bool:
        """Seals and stores gathered values; returns False if the store did not take all of them."""
        ends, keys = self._ends, values.keys
        if self._files is None or self._native is None:
            self._seal(values, slots)
            put = partial(ends.store.put, keys, slots)
        else:
            starts, engine = b"".join(values.starts), self._native.engine
            put = partial(self._files.put_sealed, keys, slots, starts, engine)
        with child.in_store_call():
            accepted = count_of(put(), keys, ends.store)
            ends.count_tokens("saved", values.num_counted[:accepted])
        return accepted == len(values)

    def _seal(self, values: Values, slots: Slots) -> None:
        """Writes the headers, with checksums, of values whose payloads are in the slots already."""
        views = [slots.value(i) for i in range(len(values))]
        for start, view in zip(values.starts, views, strict=True):
            view[: block.START_BYTES] = start
        for view, computed in zip(views, self._ends.swap.checksums(views), strict=True):
            block.write_checksum(view, computed)

    def _read(self, child: ChildJob, values: Values, slots: Slots) -> Read:
        """Reads values into the slots in one call of the library; if that fails, step by step."""
        if self._files is not None and self._native is not None:
            starts, engine = b"".join(values.starts), self._native.engine
            with child.in_store_call(), contextlib.suppress(StoreError):  # the steps raise it again
                answer = self._files.get_right(values.keys, slots, starts, engine)
                if count_of(answer, values.keys, self._ends.store) == len(values):
                    return Read(len(values))
        return read_values(self._ends, child, values, slots)

    def _start(self, direction: Direction, move: Move, slots: Slots) -> Callable[[], None]:
        """Starts copies between paged cache and slots; returns a function that waits for them."""
        values, ready, *_ = move
        before = move.tokens_before(self._ends.layout)
        columns = values.parts, values.block_ids, values.num_cells, before
        if self._native is not None:
            numbers = slots.numbers[: len(values)]
            payloads = [self._base + number * slots.slot_bytes for number in numbers]
            packed = self._native.pack_columns(*columns, payloads)
            ticket = self._native.submit(direction, packed, ready=self._native.handle_of(ready))
            return partial(self._native.finish, ticket)
        payload_views = (slots.value(i)[block.HEADER_BYTES :] for i in range(len(values)))
        copies = [BlockCopy(*fields) for fields in zip(*columns, payload_views, strict=True)]
        if direction is Direction.LOAD:
            return self._ends.swap.start_scatter(copies, ready)
        return partial(self._ends.swap.gather, copies, ready)

    def _lend_beside_a_copy(
        self, child: ChildJob, held: contextlib.ExitStack, most: int
    ) -> list[int]:
        """Lends slots for whole blocks; finishes the running copy before it waits for slots."""
        if child.has_copy_under_way:
            at_once = self._lend(child, most, self._num_parts, Deadline(0.0))
            if numbers := held.enter_context(at_once):
                return numbers
            child.finish_copy()
        return held.enter_context(self._lend(child, most, self._num_parts, child.job.deadline))

    def _lend(
        self, child: ChildJob, most: int, least: int, deadline: Deadline
    ) -> AbstractContextManager[list[int]]:
        return self._staging.loan(
            child.job.direction,
            min(most, self._window),
            least=least,
            deadline=deadline,
            is_over=lambda: child.is_over,
        )

    def _slots(self, numbers: Sequence[int], sizes: Sequence[int]) -> Slots:
        staging, count = self._staging, min(len(numbers), len(sizes))
        return Slots(staging.view, staging.slot_bytes, numbers[:count], sizes[:count])


class InPlaceEnd(StoreEnd):
    """Saves by gathering blocks into an arena's memory; loads by scattering from its values there.

    A save stores several ranges in one call of the library; a load begins one window in one call.
    If a call cannot save all values, even after room was made, the save goes on block by block. If
    a call cannot load them, they are copied to private memory to find which is wrong or missing.

    A value may be evicted while a load copies from it. So after the copy the arena is asked which
    values are still stored, and which were right when copied: a value counts if it is both.

    arena: the store of `ends`.
    memory: the arena's memory, which is being registered with the device; jobs wait for that.
    """

    def __init__(
        self, ends: Ends, swap: NativeSwap, arena: ArenaStore, memory: PinnedMemory, split: Split
    ) -> None:
        self.split = split
        self.memory = memory
        self._ends = ends
        self._swap = swap
        self._arena = arena
        largest = block.HEADER_BYTES + ends.layout.largest_payload_bytes
        turn_bytes = split.at_once * split.range_bytes
        self._window = max(len(ends.layout.owned_parts), -(-turn_bytes // largest))

    @contextlib.contextmanager
    def slots(self, child: ChildJob, sizes: Sequence[int], least: int = 1) -> Iterator[Slots]:
        some = sizes[: max(least, self._window)]
        view = memoryview(bytearray(len(some) * max(some)))
        yield Slots(view, max(some), range(len(some)), some)

    def save(
        self, child: ChildJob, moves: Sequence[Move], gathered: Callable[[], None]
    ) -> Reason | None:
        self._wait_for_memory(child)
        try:
            self._fill(child, moves)
        except StoreError as error:
            self._fill_again(child, moves, error)
        for _ in moves:
            gathered()
        return None

    def load_window(
        self, child: ChildJob, move: Move, loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        self._wait_for_memory(child)
        values = move.values
        window = values[: values.num_whole(min(self._window, len(values)))]
        rest, shortfall = values[len(window) :], None
        for _ in range(_MOST_TRIES):
            if not window or self._begins(child, move._replace(values=window), loaded):
                return shortfall, rest
            with self.slots(child, window.sizes, len(window)) as slots:
                found = read_values(self._ends, child, window, slots)
            if found.num_right < len(window):
                shortfall = found.shortfall
                window = window[: window.num_whole(found.num_right)]
        return Shortfall(Reason.LOST), rest

    def _wait_for_memory(self, child: ChildJob) -> None:
        """Waits until memory is pinned. Raises the error of that, or JobError if the job ended."""
        while not self.memory.is_ready(_LOOK_S):
            child.raise_if_over()

    def _fill(self, child: ChildJob, moves: Sequence[Move]) -> None:
        """Stores all values in one call, which waits while others hold the arena's lock."""
        batches = [self._batch(move) for move in moves]
        counted = [number for move in moves for number in move.values.num_counted]
        while True:
            with child.copying(), child.in_store_call():
                filled = self._arena.fill(batches)
            self._ends.count_tokens("saved", [counted[i] for i in filled.indices])
            if filled.error is None:
                return
            if not isinstance(filled.error, StoreTimeout):
                raise filled.error
            with child.in_store_call():  # a match waits for the lock, outside `copying`
                self._ends.store.match(moves[0].values.keys)

    def _fill_again(self, child: ChildJob, moves: Sequence[Move], error: StoreError) -> None:
        """Stores all values in one call if the error's cause is removed, else block by block."""
        if moves[0].mends(error):
            with contextlib.suppress(StoreError):
                self._fill(child, moves)
                return
        for move in moves:
            for one in move.values.blocks():
                _mended(partial(self._fill, child, [move._replace(values=one)]), move)

    def _begins(self, child: ChildJob, move: Move, loaded: Loaded) -> bool:
        """Starts to scatter values; returns False if one is missing or wrong."""
        batch, copies = self._batch(move), None
        with contextlib.ExitStack() as held:
            held.enter_context(child.copying())
            try:
                with child.in_store_call():
                    copies = self._arena.start_scatter(batch)
            except JobError:  # the job has ended: wait for the copies before raising
                if copies is not None:
                    self._swap.finish(copies)
                raise
            if copies is None:
                return False
            wait = partial(self._swap.finish, copies)
            copied = partial(self._confirm, copies, move.values, loaded)
            child.finish_copy(partial(_finish, held.pop_all(), wait, copied))
        return True

    def _confirm(self, copies: Ticket, values: Values, loaded: Loaded) -> None:
        """Counts, after a copy, the values that were right and are still stored.

        If the first value that was not right when copied is still stored, it is corrupt.
        """
        num_there, num_right = self._arena.confirm(copies)
        there = values[: values.num_whole(min(num_there, num_right))]
        reason = Reason.CORRUPT if num_right < num_there else Reason.LOST
        loaded(there, None if len(there) == len(values) else reason)
        self._ends.count_tokens("loaded", there.num_counted)

    def _batch(self, move: Move) -> ValueBatch:
        values, before = move.values, move.tokens_before(self._ends.layout)
        columns = [0] * len(values), values.parts, values.num_cells, before
        block_ids = array("q", chain.from_iterable(values.block_ids))
        return ValueBatch(
            keys=values.keys,
            sizes=array("q", values.sizes).tobytes(),
            starts=b"".join(values.starts),
            engine=self._swap.engine,
            items=self._swap.pack_items(*columns, map(len, values.block_ids)),
            block_ids=block_ids.tobytes(),
            ready=self._swap.handle_of(move.ready),
        )


def _mended(put: Callable[[], object], move: Move, tries: int = 8) -> object:
    """Puts a save's values, again if `mends` made room, which other saves may take first."""
    try:
        return put()
    except StoreError as error:
        if tries == 1 or not move.mends(error):
            raise
    return _mended(put, move, tries - 1)


def _finish(
    held: contextlib.ExitStack, wait: Callable[[], None], copied: Callable[[], None]
) -> None:
    """Waits for copies, calls `copied`, and gives back what the copies held."""
    with held:
        wait()
        copied()
