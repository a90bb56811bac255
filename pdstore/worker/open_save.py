"""OpenSave: tells a save what it may read. RunningSaves: waits for all saves."""

# Decision: docs/decisions/020-saves-behind-launch.md
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdstore.errors import JobResult, SaveFailed, Severity
from pdstore.store.transfer import ReadyEvent
from pdstore.threads import Deadline
from pdstore.worker.job import Job
from pdstore.worker.save import SaveWork
from pdstore.worker.values import bytes_of


class OpenSave:
    """A save whose layers become readable in order. `KVPool.begin_save` makes it.

    Only one thread at a time may call `layers_done`. A layer range is saved when its last layer is
    done; but small ones wait until they and those after them have enough bytes together.

    If layers are only queued on a device, no layer range is saved before the calling thread has
    queued all work, since workers would take the GIL from it; each range waits for its event.

    order: returns an event after the work queued on the caller's stream; None without a stream.
    wake: tells the job queue that the model makes progress, and that there may be new shares.
    at_begin: functions that are called once, when the first layers are released.
    """

    def __init__(
        self,
        job: Job,
        work: SaveWork,
        order: Callable[[], ReadyEvent | None],
        wake: Callable[[], None],
        at_begin: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.job = job
        self._work = work
        self._prompt = work.prompt
        self._split = work.mover.transfer.split
        self._order = order
        self._wake = wake
        self._at_begin = at_begin
        self._held = work.prompt.layout.held_ranges
        self._num_whole = 0  # the first so many of `_held` are done
        self._num_queued = 0
        self._queued: list[tuple[Sequence[int], ReadyEvent | None]] = []

    def layers_done(
        self, num_layers: int, ready: ReadyEvent | None = None, *, will_continue: bool = False
    ) -> None:
        """Says that the first `num_layers` layers of this rank's cache hold the tokens to save.

        ready: an event after which this is true; None: it is true after the work queued on the
          calling thread's current stream. A call is cheap: it does nothing until a range is whole.
        will_continue: True if the thread will queue more work on the device, so that workers wait.
          When all layers are done, a call with False lets them begin.
        Raises SwapError while the stream is being captured into a graph.
        """
        num_whole = self._prompt.layout.num_whole_ranges(num_layers)
        if num_whole > self._num_whole:
            if not self._waits_for_more(num_whole):
                self._queue(num_whole, ready or self._order())
            self._num_whole = num_whole
        if self._queued and not will_continue and self._num_queued == len(self._held):
            self._release_queued()

    def _queue(self, num_whole: int, ready: ReadyEvent | None) -> None:
        self._queued.append((self._held[self._num_queued : num_whole], ready))
        self._num_queued = num_whole
        if ready is None:
            self._release_queued()
        else:
            self._wake()  # restarts the timeout

    def _waits_for_more(self, num_whole: int) -> bool:
        """True if the layer ranges that are whole but not queued have too few bytes for a save."""
        if num_whole == len(self._held):
            return False
        waiting = self._held[self._num_queued : num_whole]
        return sum(map(self._bytes_of, waiting)) < self._split.early_bytes

    def _bytes_of(self, layer_range: int | None) -> int:
        layout, keys = self._prompt.layout, self._prompt.keys
        return bytes_of(layout, keys, self._work.first_block, layer_range)

    def _release_queued(self) -> None:
        at_begin, self._at_begin = self._at_begin, ()
        for call in at_begin:
            call()
        for numbers, ready in self._queued:
            are_all = numbers == self._held
            for number in [None] if are_all else numbers:
                is_last = are_all or number == self._held[-1]
                if is_last and (drafts := self._prompt.layout.draft_range) is not None:
                    self._release(drafts, ready)  # first, as D waits for the others alone
                self._release(number, ready, is_last=is_last)
        self._queued.clear()
        self._wake()

    def _release(
        self, layer_range: int | None, ready: ReadyEvent | None, *, is_last: bool = False
    ) -> None:
        first, stop = self._work.first_block, len(self._prompt.keys)
        ranges = self._split.ranges(first, stop, self._bytes_of(layer_range))
        self._work.release(ranges, ready, layer_range=layer_range, is_last=is_last)


class RunningSaves:
    """The saves that have not ended, and the first failure that no flush has reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Job, None] = {}
        self._failure: JobResult | None = None

    def add(self, job: Job) -> None:
        """Adds a save."""
        with self._lock:
            self._jobs[job] = None
        job.on_end(self._save_ended)

    def flush(self, timeout_s: float) -> None:
        """Waits for the end of all saves that were added before.

        Raises SaveFailed for the first save that failed since the last flush; TimeoutError if a
        save still runs after `timeout_s`.
        """
        limit = Deadline(timeout_s)
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            try:
                job.wait(limit.remaining_s())
            except TimeoutError:  # its text has the remaining time
                raise TimeoutError(f"a save still runs after {timeout_s} s") from None
            self._save_ended(job)  # the job calls it as well, maybe later
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            reason = failure.reason.value if failure.reason else "unknown"
            raise SaveFailed(
                f"a save ended with {reason}; {failure.num_tokens} leading tokens are durable"
            ) from failure.error

    def _save_ended(self, job: Job) -> None:
        """Notes the end of a save. Only the first call, by the job or by `flush`, has an effect."""
        with self._lock:
            if job not in self._jobs:
                return
            del self._jobs[job]
            result = job.result
            reason = None if result is None else result.reason
            if reason is not None and reason.severity is not Severity.ORDINARY:
                self._failure = self._failure or result
