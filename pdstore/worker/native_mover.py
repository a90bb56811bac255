"""NativeMover: moves all values of a share in place, in one call of the library."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from pdstore.format.keys import Kind, kind_of
from pdstore.native.arena import text_of
from pdstore.native.value_batch import ValueBatch
from pdstore.outcome import Reason
from pdstore.store.in_place import NativeInPlace, Taken
from pdstore.worker.block_range import RANGE_BYTES, Split
from pdstore.worker.child_job import ChildJob
from pdstore.worker.in_place_mover import InPlaceMover
from pdstore.worker.job_run import Urgency
from pdstore.worker.mapped_memory import MappedMemory
from pdstore.worker.mover import Ends, Loaded, Source
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.swap.native import NativeSwap, UnplacedCopy
from pdstore.worker.value_run import ValueRun
from pdstore.worker.values import Value
from pdstore.worker.verified import Verified

_REST_S = 0.001
"""A worker sleeps for so long after the last shares of a hand-off: P answers at about that time,
and would wait for Python's lock."""


class NativeMover(InPlaceMover):
    """Stores several ranges in one call; borrows, scatters and verifies one in another.

    All Python that a worker runs keeps the engine's thread from Python's lock, so it runs little.
    When the library cannot do all of a call, `InPlaceMover` does it step by step and finds out why.

    swap, in_place: the swap and the store of `ends`.
    memory: as `InPlaceMover` takes it.
    num_workers: that move values at a time.
    range_bytes: about how much one batch of a call moves.
    """

    def __init__(
        self,
        ends: Ends,
        swap: NativeSwap,
        in_place: NativeInPlace,
        memory: MappedMemory,
        num_workers: int,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        super().__init__(ends, in_place, memory, Split.native(range_bytes))
        self._native_swap, self._native = swap, in_place
        self._num_workers = num_workers

    def save(
        self, child: ChildJob, sources: Sequence[Source], gathered: Callable[[], None]
    ) -> Reason | None:
        self._wait_for_memory(child)
        batches = [self._batch(source.values, 0, source.ready) for source in sources]
        kinds = [kind for source in sources for kind in _kinds_of(source.values)]
        is_end = child.urgency is Urgency.HANDOFF and child.num_left < self._num_workers
        with child.copying(), child.in_store_call():
            filled = self._native.fill(kinds, batches, _REST_S if is_end else 0.0)
        start = 0
        for values, _ in sources:
            end = start + len(values)
            new = [i - start for i in filled.indices if start <= i < end]
            self._count("saved", values if len(new) == len(values) else [values[i] for i in new])
            start = end
        if not filled.is_whole:
            return super().save(child, sources, gathered)
        for _ in sources:
            gathered()
        return None

    def _take(
        self,
        child: ChildJob,
        window: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None,
        loaded: Loaded,
    ) -> Verified:
        self._wait_for_memory(child)
        batch = self._batch(window, first_token, ready)
        with contextlib.ExitStack() as held:
            child.begin_copy()
            held.callback(child.end_copy)
            taken = self._start(child, held, window, batch)
            if taken is not None:
                finish = partial(self._finish, taken, held.pop_all(), window, loaded)
                child.follow(finish)
                return Verified(len(window))
        return super()._take(child, window, first_token, ready, loaded)

    def _start(
        self,
        child: ChildJob,
        held: contextlib.ExitStack,
        window: Sequence[Value],
        batch: ValueBatch,
    ) -> Taken | None:
        """Starts copies that nobody waits for yet; `held` gives back what they need.

        Raises JobError, and has waited for the copies, if the job ended meanwhile.
        """
        with contextlib.ExitStack() as undo:
            with child.in_store_call():
                taken = self._native.take(batch)
                if taken is not None:
                    held.callback(self._native.release, taken.loan)
                    undo.callback(self._native_swap.finish, taken.copies)
            undo.pop_all()
        return taken

    def _finish(
        self,
        taken: Taken,
        held: contextlib.ExitStack,
        window: Sequence[Value],
        loaded: Loaded,
    ) -> None:
        """Waits for copies and counts the values that were theirs all the time."""
        with held:
            self._native_swap.finish(taken.copies)
            self._confirm(taken.loan, window, loaded, taken.copies.num_right)

    def _batch(
        self, window: Sequence[Value], first_token: int, ready: ReadyEvent | None
    ) -> ValueBatch:
        if isinstance(window, ValueRun) and not self._begins_within(window, first_token):
            return self._batch_of_run(window, ready)
        packed = self._native_swap.pack_unplaced(
            UnplacedCopy(
                value.part,
                value.block_ids,
                value.num_cells,
                self._tokens_before(value, first_token),
            )
            for value in window
        )
        return ValueBatch(
            names=text_of([value.key for value in window]),
            sizes=array("q", [value.size for value in window]).tobytes(),
            starts=b"".join([value.start for value in window]),
            engine=self._native_swap.engine,
            items=packed.items,
            ids=packed.ids,
            ready=self._native_swap.handle_of(ready),
        )

    def _batch_of_run(self, run: ValueRun, ready: ReadyEvent | None) -> ValueBatch:
        """Returns the batch as `_batch` does, without a look at any value."""
        packed, part = run.packed, (run.first, run.stop)
        return ValueBatch(
            names=packed.names(*part),
            sizes=packed.sizes(*part),
            starts=packed.starts(*part),
            engine=self._native_swap.engine,
            items=self._native_swap.pack_items(packed, *part),
            ids=packed.ids(*part),
            ready=self._native_swap.handle_of(ready),
        )


def _kinds_of(window: Sequence[Value]) -> list[Kind]:
    if isinstance(window, ValueRun):
        return [Kind.BLOCK] * len(window)
    return [kind_of(value.key) for value in window]
