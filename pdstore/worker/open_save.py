"""OpenSave: a save that begins while the model still computes the layers it will save."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdstore.worker.block_range import Split
from pdstore.worker.job import Job
from pdstore.worker.save_work import SaveWork
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import PromptBlocks, bytes_of


class OpenSave:
    """A save whose layers become readable in order. Made by `KVPool.begin_save`.

    One thread at a time calls `layers_done`. Layer ranges are saved when the last layer of one is
    said to be done and they hold enough together, else with the ranges behind them.

    Where the layers are only queued on a device, all ranges begin when the calling thread has no
    more to queue, each behind its own event: workers that begin sooner would take Python's lock
    from that thread, and the device is behind it anyway.

    split: how blocks are shared out, and when layer ranges are saved early.
    order: records an event behind what the calling thread's stream has queued; None without one.
    wake: tells the queue that the model goes on, and that there may be more to do.
    at_begin: called once each, when the first layers are done.
    """

    def __init__(
        self,
        job: Job,
        work: SaveWork,
        prompt: PromptBlocks,
        split: Split,
        order: Callable[[], ReadyEvent | None],
        wake: Callable[[], None],
        at_begin: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.job = job
        self._work, self._prompt, self._split = work, prompt, split
        self._order, self._wake = order, wake
        self._at_begin = at_begin
        self._held = prompt.layout.held_ranges
        self._num_whole = self._num_queued = 0  # of the layer ranges held
        self._queued: list[tuple[Sequence[int], ReadyEvent | None]] = []

    def layers_done(
        self, num_layers: int, ready: ReadyEvent | None = None, *, goes_on: bool = False
    ) -> None:
        """Says that the first `num_layers` layers of this rank's cache hold the tokens to save.

        ready: an event after which they do; None: after what the calling thread's current stream
          has queued. It is cheap to call for every layer: nothing happens before a range is whole.
        goes_on: the thread has more to queue on the device, so workers wait. When all layers are
          told, a call without it lets them begin.
        Raises SwapError while the stream is being captured into a graph.
        """
        num_whole = self._prompt.layout.num_whole_ranges(num_layers)
        if num_whole > self._num_whole:
            if not self._waits_for_more(num_whole):
                self._queue(num_whole, ready or self._order())
            self._num_whole = num_whole
        if self._queued and not goes_on and self._num_queued == len(self._held):
            self._release_queued()

    def _queue(self, num_whole: int, ready: ReadyEvent | None) -> None:
        at_begin, self._at_begin = self._at_begin, ()
        for call in at_begin:
            call()
        self._queued.append((self._held[self._num_queued : num_whole], ready))
        self._num_queued = num_whole
        if ready is None:
            self._release_queued()
        else:
            self._wake()  # the model goes on

    def _waits_for_more(self, num_whole: int) -> bool:
        """True if the ranges that are whole but not queued are too small to be saved alone."""
        layout, keys, first = self._prompt.layout, self._prompt.keys, self._work.first_block
        if num_whole == len(self._held):
            return False
        waiting = self._held[self._num_queued : num_whole]
        num_bytes = sum(bytes_of(layout, keys, first, number) for number in waiting)
        return num_bytes < self._split.early_bytes

    def _release_queued(self) -> None:
        for numbers, ready in self._queued:
            if numbers == self._held:
                self._release(None, ready, is_last=True)
            else:
                for number in numbers:
                    self._release(number, ready, is_last=number == self._held[-1])
        self._queued.clear()
        self._wake()

    def _release(self, layer_range: int | None, ready: ReadyEvent | None, *, is_last: bool) -> None:
        layout, keys, first = self._prompt.layout, self._prompt.keys, self._work.first_block
        num_bytes = bytes_of(layout, keys, first, layer_range)
        ranges = self._split.ranges(first, len(keys), num_bytes)
        self._work.release(ranges, ready, layer_range=layer_range, is_last=is_last)
