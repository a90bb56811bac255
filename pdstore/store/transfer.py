"""Transfer: how values are moved between the paged cache and a store, on a worker's thread.

Values of most stores pass through staging: gather, seal and put, or get, verify and scatter. A
store that can move them in a better way has the call of `MovesValues`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from pdstore.errors import Direction, Reason, StoreError
from pdstore.format.geometry import Geometry
from pdstore.format.keys import BlockKey
from pdstore.format.values import BlockRange, Values
from pdstore.metrics import Metrics
from pdstore.native.engine import Engine, Ticket
from pdstore.store.base import Slots, Store, is_count
from pdstore.threads import Deadline

A = TypeVar("A")

RANGE_BYTES = 32 << 20
"""The approximate bytes of a block range. With smaller ranges, workers wait for the GIL; larger
ranges do not fit the cores' caches."""


class Split(NamedTuple):
    """The way in which a job's blocks are split into ranges, and how early a save begins.

    range_bytes: the approximate bytes of one range.
    many: a job of fewer ranges is split into this many smaller ranges, none of them smaller than
      `range_bytes / many`, so that several workers share it. 1 makes no such split: the library
      spreads the work on one range over the processors.
    at_once: how many ranges a worker moves in one share, because a call of the library takes them.
    num_workers: the default of PDSTORE_WORKERS: up to 16, because the calls of most stores wait.
    most_woken: how many workers a job wakes that no other instance waits for. Each of them takes
      the GIL from the engine; the library needs only one to keep the device busy.
    early_ranges: a layer range of at least this many ranges' bytes is saved while later layers are
      computed. Smaller layer ranges are saved together, because each save takes time in Python.
    """

    range_bytes: int = RANGE_BYTES
    many: int = 8
    at_once: int = 1
    num_workers: int = max(4, min(16, len(os.sched_getaffinity(0))))
    most_woken: int = 1 << 16
    early_ranges: int = 4

    @property
    def early_bytes(self) -> int:
        """Minimum bytes of a layer range that is saved while later layers are computed."""
        return self.early_ranges * self.range_bytes

    def ranges(self, first: int, stop: int, num_bytes: int) -> list[BlockRange]:
        """Splits the blocks first..stop, which have `num_bytes` bytes, into even ranges."""
        least_bytes = max(1, self.range_bytes // self.many)
        wanted = max(num_bytes // self.range_bytes, min(self.many, num_bytes // least_bytes))
        count = max(1, min(wanted, stop - first))
        ends = [first + (stop - first) * i // count for i in range(count + 1)]
        return [BlockRange(*ends) for ends in pairwise(ends)]


class Shortfall(NamedTuple):
    """The reason why a job did less than all of its work; the exception behind it, if any."""

    reason: Reason
    error: Exception | None = None


class ReadyEvent(Protocol):
    """Fires when the paged cache may be copied; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Blocks until the event fires."""

    def query(self) -> bool:
        """Returns True if the event has fired."""


class Move(NamedTuple):
    """Values to be moved together.

    ready: an event that the copies wait for; a load reads the store without waiting for it.
    first_token: an index in the prompt; a load does not write the tokens before it.
    on_store_error: for a save: takes the store's error; returns True if it has removed the cause,
      so that the put should be tried again.
    """

    values: Values
    ready: ReadyEvent | None
    first_token: int = 0
    on_store_error: Callable[[StoreError], bool] = lambda _: False

    def cells_before(self, geometry: Geometry) -> list[int]:
        """Returns for each value how many cells of its block come before `first_token`.

        That is 0 for every block except the one that contains `first_token`.
        """
        values = self.values
        first_block, before = divmod(self.first_token, geometry.block_tokens)
        if before == 0:
            return [0] * len(values)
        cells = {part: of.cache.cells_before(before) for part, of in geometry.parts.items()}
        return [
            cells[part] if number == first_block else 0
            for part, number in zip(values.parts, values.numbers, strict=True)
        ]

    def put(self, put: Callable[[], A], tries: int = 8) -> A:
        """Makes a put; makes it again if `on_store_error` has made room, which others may take."""
        try:
            return put()
        except StoreError as error:
            if tries == 1 or not self.on_store_error(error):
                raise
        return self.put(put, tries - 1)


Loaded: TypeAlias = Callable[[Values, Reason | None], None]
"""Called after a copy with the loaded values, in whole blocks, and the reason if some are not."""


class Turn(Protocol):
    """A worker's turn at a job: it does one share after the other, on its own thread."""

    @property
    def direction(self) -> Direction:
        """The direction of the job: a save or a load."""

    @property
    def deadline(self) -> Deadline:
        """The end of the job's time; it may be set anew."""

    @property
    def is_over(self) -> bool:
        """True if the job has ended or will end after its copies: it may begin nothing new."""

    @property
    def has_copy_under_way(self) -> bool:
        """True if the worker has left a copy running."""

    def raise_if_over(self) -> None:
        """Raises JobError if the job has ended; the caller then only gives back its slots."""

    def copying(self) -> AbstractContextManager[None]:
        """Surrounds a copy from or to the paged cache. Raises JobError if the job has ended."""

    def in_store_call(self) -> AbstractContextManager[None]:
        """Surrounds a store call. Raises JobError before or after the call if the job has ended."""

    def finish_copy(self, following: Callable[[], None] | None = None) -> None:
        """Waits for the copy in flight. `following` is the next one, which may run already.

        following: waits for the next copy, gives back its slots and ends its `copying`.
        """

    def before_next_copy(self) -> AbstractContextManager[None]:
        """Surrounds copies that are made while the next copy, which runs already, has to wait.

        The end of the `with` waits for them.
        """

    @property
    def may_wait(self) -> bool:
        """False while the worker has set a copy aside, whose slots other jobs may wait for."""


class HostMemory(Protocol):
    """Host memory that copies use, while it is being registered with the device."""

    num_bytes: int

    def ready(self, timeout_s: float) -> None:
        """Waits until copies may use all of it. Raises the error of a failure, or TimeoutError."""

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s`; True if copies may use all of it. Raises an earlier error."""


class NativeCopies(Protocol):
    """Block copies by libpdstore, for calls of the library that copy blocks themselves."""

    engine: Engine

    def pack(self, move: Move, payloads: Sequence[int] | None = None) -> tuple[bytes, bytes]:
        """Returns the copies of a move as the library's items and block ids.

        payloads: the address of each value's payload; None if the library's call sets them.
        """

    def handle_of(self, ready: ReadyEvent | None) -> int:
        """Returns the handle of a CUDA event; waits for any other event and returns 0."""

    def finish(self, ticket: Ticket) -> None:
        """Waits for a copy without a timeout: the device may use the payloads until its end."""


class BlockCopies(Protocol):
    """Copies between the paged cache and host memory.

    native: the same copies by libpdstore; None if torch makes them.
    """

    @property
    def native(self) -> NativeCopies | None: ...

    def device_event_or_wait(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if the device can wait for it; else waits for it and returns None."""

    def start(self, direction: Direction, move: Move, slots: Slots) -> Callable[[], None]:
        """Starts to copy the payloads of a move's values from or to slots behind their headers.

        Returns a function that waits for the copies; it must be called. On a GPU the slots must lie
        in memory that `TransferContext.pin` has registered. Raises LayoutError or SwapError.
        """

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        """Returns the checksum of each value's payload."""


@dataclass(frozen=True)
class Moved(Generic[A]):
    """The outcome of a call that a transfer makes to its store in place of get, put or match.

    num_values, num_bytes: what it moved. error: why it did not move all, if it does not raise it.
    """

    answer: A
    num_values: int = 0
    num_bytes: int = 0
    error: StoreError | None = None


def moved_by(
    call: Callable[[Sequence[BlockKey], Slots], int], keys: Sequence[BlockKey], slots: Slots
) -> Moved[int]:
    """Makes a call of the form of `Store.get` and `Store.put`; counts the bytes of its answer."""
    answer = call(keys, slots)
    count = answer if is_count(answer, len(keys)) else 0
    return Moved(answer, count, sum(slots.sizes[:count]))


class CallHook(Protocol):
    """Makes a call of a store for a wrapper, which may refuse it, count it or time it.

    verb: the method of `Store` that the call stands for: match, get, put or remove.
    """

    def __call__(
        self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]
    ) -> Moved[A]:
        """Returns what `call` returns, or raises its error."""


def _make(verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]) -> Moved[A]:
    return call()


class Sealer(Protocol):
    """A store that seals and verifies values in its own library, in the same call that moves them.

    header_prefixes: the first 56 bytes of each value, one after the other.
    """

    def put_sealed(
        self, keys: Sequence[BlockKey], slots: Slots, header_prefixes: bytes, engine: Engine
    ) -> int:
        """Writes headers and checksums into the slots, and does what `Store.put` does."""

    def get_right(
        self, keys: Sequence[BlockKey], slots: Slots, header_prefixes: bytes, engine: Engine
    ) -> int:
        """Does what `Store.get` does; returns 0 if not all values are there and right."""


@dataclass(frozen=True)
class TransferContext:
    """Parts that a transfer works with.

    store: the store that an engine opened, with all its wrappers; `get`, `match` and `remove` of a
      transfer go there.
    removed: reasons; a value that is wrong for one of them is removed from the store.
    range_bytes: the approximate bytes of a block range.
    pin: registers memory with the device, in spans that no value crosses; the pool unregisters it.
    staged: opens the way through staging, over get and put of the context's store.
    call: makes each other call of a store that moves or finds values, so that wrappers see it.
    promotes: True if what a load finds in a slower tier may be put into a faster one.
    may_lie_elsewhere: True if `store` may have values that the transfer's own store lacks.
    """

    geometry: Geometry
    store: Store
    copies: BlockCopies
    metrics: Metrics
    removed: frozenset[Reason]
    range_bytes: int
    pin: Callable[[memoryview, int], HostMemory]
    staged: Callable[[TransferContext, Split, Sealer | None], Transfer]
    call: CallHook = _make
    promotes: bool = True
    may_lie_elsewhere: bool = False

    def count_saved(self, num_counted: Sequence[int]) -> None:
        """Counts the tokens of values that were stored, each block once (`Values.num_counted`)."""
        self.metrics.tokens.labels("saved").inc(sum(num_counted))

    def over(self, store: Store) -> TransferContext:
        """Returns the context for a transfer whose `get`, `match` and `remove` go to `store`."""
        return replace(self, store=store)

    def through(self, hook: CallHook) -> TransferContext:
        """Returns the context for a store inside a wrapper: calls go through the wrapper's hook."""
        return replace(self, call=_Hooks(self.call, hook))


@dataclass(frozen=True)
class _Hooks:
    """The hooks of two wrappers, one inside the other, as one."""

    outer: CallHook
    inner: CallHook

    def __call__(
        self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]
    ) -> Moved[A]:
        return self.outer(verb, keys, partial(self.inner, verb, keys, call))


class Transfer(ABC):
    """A way to move values between the paged cache and a store. The workers of jobs call it.

    split: how jobs are split for this way.
    memory: the host memory that copies use; copies wait until it is pinned.
    """

    split: Split
    memory: HostMemory

    @abstractmethod
    def slots(
        self, turn: Turn, sizes: Sequence[int], least: int = 1
    ) -> AbstractContextManager[Slots]:
        """Lends slots for some leading values: for at least `least` of them, or for none."""

    @abstractmethod
    def save(
        self, turn: Turn, moves: Sequence[Move], on_captured: Callable[[], None]
    ) -> Reason | None:
        """Saves values, and waits for all copies. Returns why not all are saved, or None.

        The store may later lose values that it has taken. Raises StoreError.
        on_captured: called for each move when its blocks have been copied out of the paged cache.
        """

    @abstractmethod
    def load_window(
        self, turn: Turn, move: Move, on_loaded: Loaded
    ) -> tuple[Shortfall | None, Values]:
        """Loads some leading values, in whole blocks: get, verify, scatter.

        The last copy may still run when it returns; `turn.finish_copy` waits for that copy.
        on_loaded: called after each copy.
        Returns why some of the leading values are not loaded, or None; and the values after these.
        """


@runtime_checkable
class MovesValues(Protocol):
    """A store that moves values in a way of its own, for example by copies in its memory."""

    def transfer(self, context: TransferContext) -> Transfer | None:
        """Opens its way; None if it has none here, so that values pass through staging."""
