"""ChunkPool: finds, loads and saves LMCache's chunks on threads of its own."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from pdstore.errors import (
    ConfigError,
    Direction,
    PoolClosed,
    QueueFull,
    ReadOnly,
    Reason,
    reason_of,
)
from pdstore.metrics import Metrics
from pdstore.settings import LOOKUP_TIMEOUT_S, Settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store
from pdstore.threads import Ticker, Worker
from pdstore_lmcache.chunk_mover import Chunk, ChunkFinder, ChunkMover, shares
from pdstore_lmcache.chunk_names import ChunkNames, ChunkShape, ObjectKey
from pdstore_lmcache.chunk_task import ChunkTask, Ended

_NUM_LOOKUP_WORKERS = 2
_SHARE_BYTES = 4 << 20
_BYTES_PER_S = 1 << 30  # a deadline has a second more for each
_JOIN_S = 5.0
_LATE_CHECK_S = 0.25


Work: TypeAlias = Callable[[ChunkTask], Reason | None]
"""Does a share of a task; returns why it could not do all of it."""


class ChunkMemory(NamedTuple):
    """A chunk as LMCache hands it over: its name, its shape, and the memory of its payload."""

    key: ObjectKey
    shape: ChunkShape
    memory: memoryview


@dataclass
class _Share:
    """Some of a task's chunks, for a worker (`pdstore.threads.Task`)."""

    task: ChunkTask
    work: Work

    def run(self) -> None:
        self.task.share_ended(None if self.task.is_over else self.work(self.task))

    def fail(self, error: Exception) -> None:
        self.task.share_ended(reason_of(error), error)


class ChunkPool:
    """A store's chunks for one LMCache server. Calls return at once; any thread may make them.

    Each call's `ended` is called exactly once: on a thread of the pool, or on the caller's for
    what cannot begin.

    store: None for the one at PDSTORE_STORE.
    max_calls: more that wait are refused.
    Raises ConfigError or StoreError from the constructor, as `connect_store`.
    """

    def __init__(
        self,
        settings: Settings,
        names: ChunkNames,
        metrics: Metrics,
        store: Store | None = None,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        max_calls: int = 1024,
    ) -> None:
        self._settings = settings
        self._num_workers = settings.workers or 8  # 16 would have too little staging each
        self._lookup_timeout_s = lookup_timeout_s
        self._max_calls = max_calls
        self._names = names
        self._metrics = metrics
        self._saves = settings.publish and (settings.role != "decode" or settings.save_decoded)
        self._transfers: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._lookups: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._open: dict[int, ChunkTask] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            self._store = connect_store(settings, metrics) if store is None else store
            undo.callback(self._store.close)
            self._finder = ChunkFinder(self._store)
            self._movers = self._make_movers()
            undo.pop_all()
        self._workers = [
            Worker(f"pdstore-worker-{n}", self._transfers.get) for n in range(self._num_workers)
        ] + [Worker("pdstore-lookups", self._lookups.get) for _ in range(_NUM_LOOKUP_WORKERS)]
        self._deadlines = Ticker("pdstore-deadlines", self._end_late)

    @property
    def label(self) -> str:
        """The store's URL without secrets."""
        return self._store.label

    def find(
        self, chunks: Sequence[tuple[ObjectKey, ChunkShape]], ended: Callable[[Ended], None]
    ) -> None:
        """Looks for chunks, and leases those that are stored."""
        works = [lambda task: self._find(task, chunks)]
        self._begin(None, len(chunks), self._lookup_timeout_s, ended, works)

    def load(self, chunks: Sequence[ChunkMemory], ended: Callable[[Ended], None]) -> None:
        """Loads chunks into LMCache's memory; of one that is not right, no byte is written."""
        self._move(Direction.LOAD, self._settings.deadline_s, chunks, ended)

    def save(self, chunks: Sequence[ChunkMemory], ended: Callable[[Ended], None]) -> None:
        """Stores chunks; those are done that another process can load."""
        self._move(Direction.SAVE, self._settings.deadline_s, chunks, ended)

    def remove(self, chunks: Sequence[tuple[ObjectKey, ChunkShape]]) -> None:
        """Forgets chunks. Blocks; raises StoreError or ConfigError."""
        self._store.remove([self._names.name(*chunk).key for chunk in chunks])

    def close(self) -> None:
        """Ends what runs, and the connections. Twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = list(self._open.values())
        for task in left:
            task.end(Reason.CLOSED, PoolClosed("the pool was closed"))
        self._deadlines.stop(_JOIN_S)
        for _ in range(self._num_workers):
            self._transfers.put(None)
        for _ in range(_NUM_LOOKUP_WORKERS):
            self._lookups.put(None)
        end_s = time.monotonic() + _JOIN_S
        for worker in self._workers:
            worker.join(max(0.0, end_s - time.monotonic()))
        self._store.close()

    def _make_movers(self) -> list[ChunkMover]:
        """Makes one for each worker; a worker uses the one that was used last."""
        staging, workers = self._settings.staging, self._num_workers
        try:
            whole = self._store.allocate(staging)
        except (OSError, MemoryError) as error:
            raise ConfigError(
                f"PDSTORE_STAGING of {staging >> 20} MiB: this host does not give so much memory"
                f" ({error}): set it to less"
            ) from error
        part = staging // workers // 4096 * 4096
        buffers = [whole[n * part : (n + 1) * part] for n in range(workers)]
        return [
            ChunkMover(self._store, self._finder, buffer, saves=self._saves) for buffer in buffers
        ]

    def _move(
        self,
        direction: Direction,
        deadline_s: float,
        chunks: Sequence[ChunkMemory],
        ended: Callable[[Ended], None],
    ) -> None:
        sizes = [len(chunk.memory) for chunk in chunks]
        parts = shares(sizes, self._num_workers, _SHARE_BYTES)
        timeout_s = deadline_s + sum(sizes) / _BYTES_PER_S
        works = [
            partial(
                self._run_share, direction=direction, part=part, chunks=[chunks[n] for n in part]
            )
            for part in parts
        ]
        self._begin(direction, len(chunks), timeout_s, ended, works)

    def _begin(
        self,
        direction: Direction | None,
        num_chunks: int,
        timeout_s: float,
        ended: Callable[[Ended], None],
        works: Sequence[Work],
    ) -> None:
        number, start_s = next(self._numbers), time.monotonic()

        def end(result: Ended) -> None:
            with self._lock:
                self._open.pop(number, None)
            self._count(direction, time.monotonic() - start_s, result)
            ended(result)

        task = ChunkTask(num_chunks, len(works), timeout_s, end)
        with self._lock:
            error = self._refusal(direction)
            if error is None:
                self._open[number] = task
            is_first = len(self._open) == 1
        if error is not None:
            task.end(reason_of(error), error)
            return
        if is_first:
            self._deadlines.wake()
        waiting = self._lookups if direction is None else self._transfers
        for work in works:
            waiting.put(_Share(task, work))

    def _count(self, direction: Direction | None, seconds: float, result: Ended) -> None:
        if direction is not None:
            self._metrics.job_ended(direction, result.reason, seconds, result.error)
        elif result.reason is not None:
            self._metrics.miss(result.reason, result.error, "a lookup")

    def _refusal(self, direction: Direction | None) -> Exception | None:
        if self._is_closed:
            return PoolClosed("the pool was closed")
        if direction is Direction.SAVE and not self._saves:
            return ReadOnly("this instance loads and does not save")
        if len(self._open) >= self._max_calls:
            return QueueFull(f"{len(self._open)} calls are waiting")
        return None

    def _find(
        self, task: ChunkTask, chunks: Sequence[tuple[ObjectKey, ChunkShape]]
    ) -> Reason | None:
        keys = [self._names.name(*chunk).key for chunk in chunks]
        found = self._finder.find(list(dict.fromkeys(keys)))
        for number, key in enumerate(keys):
            if key in found:
                task.set_done(number)
        return None if len(found) == len(set(keys)) else Reason.ABSENT

    def _run_share(
        self, task: ChunkTask, direction: Direction, part: range, chunks: Sequence[ChunkMemory]
    ) -> Reason | None:
        named = [
            Chunk(number, self._names.name(chunk.key, chunk.shape), chunk.memory)
            for number, chunk in zip(part, chunks, strict=True)
        ]
        mover = self._movers.pop()  # there is one for each worker
        try:
            return (
                mover.load(task, named) if direction is Direction.LOAD else mover.save(task, named)
            )
        finally:
            self._movers.append(mover)

    def _end_late(self) -> float | None:
        with self._lock:
            open_ = list(self._open.values())
        for task in open_:
            task.end_if_late()
        return _LATE_CHECK_S if open_ else None
