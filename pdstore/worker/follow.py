"""Follow: finds the blocks of a hand-off that P has stored, and lets a load start on them."""

# Decision: docs/decisions/012-following.md
from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from itertools import accumulate

from pdstore.errors import Reason, StoreError, StoreTimeout
from pdstore.format.handoff import HandoffId, Pulse
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store, count_of
from pdstore.store.connect import read_marker
from pdstore.store.optional import meeting_store_of
from pdstore.store.watch import Waiter
from pdstore.worker.job import Job
from pdstore.worker.load import LoadWork
from pdstore.worker.values import bytes_of

_WINDOW = 128
"""Maximum number of keys in one match: these blocks must be loaded before their leases end."""
_MAX_INTERVAL_S = 0.02  # between two searches: a store may not notice all changes
_PROBE_TIMEOUT_S = 0.1  # without a new block: then P's id is asked for, and steps are small


class _Lane:
    """One layer range of a prompt: which of its blocks are stored, and which the load may read.

    It releases whole shares of blocks, because each step delays the engine. Only the last blocks of
    the last layer range are released one by one, because the client waits for them.

    after: the next layer range; None for the last one.
    """

    def __init__(self, work: LoadWork, layer_range: int, after: _Lane | None = None) -> None:
        self._work = work
        self._prompt = work.prompt
        self._split = work.mover.transfer.split
        self._layer_range = layer_range
        self._after = after
        self._released = work.first_token // self._prompt.layout.block_tokens
        values = self._prompt.values_from(self._released, layer_range)
        self._keys = values.keys
        self._numbers = values.numbers
        self._at = 0
        self._byte_ends = list(accumulate(values.sizes))
        self._share_bytes = self._split.at_once * self._split.range_bytes
        self._probes_ahead = True
        work.release([], layer_range)  # else tokens that some layer ranges still lack would count

    @property
    def probe_key(self) -> BlockKey | None:
        """The key to search for, of those that no match has found yet; None if there are none."""
        if self._at == len(self._keys):
            return None
        is_last = self._after is None or self._after._released >= self._released
        last = len(self._keys) - 1
        is_near = not self._probes_ahead or (is_last and self._index_after(2) >= last)
        return self._keys[self._at if is_near else min(self._index_after(1), last)]

    def _index_after(self, num_shares: int) -> int:
        """Returns the index of the first key beyond so many shares from the first missing one on.

        A large state among the values shortens only the share that it is in.
        """
        found_bytes = self._byte_ends[self._at - 1] if self._at else 0
        return bisect_right(self._byte_ends, found_bytes + num_shares * self._share_bytes)

    def probe_next_key(self) -> bool:
        """Waits for the first missing key from now on: P stores slowly, or has left a gap.

        Returns False if it has waited for this key already.
        """
        before = self.probe_key
        self._probes_ahead = False
        return self.probe_key != before

    @property
    def is_complete(self) -> bool:
        return self._at == len(self._keys) and self._released == len(self._prompt.keys)

    def advance(self, store: Store) -> bool:
        """Matches the keys from the first missing one on. Returns True if it found any of them."""
        before = self._at
        found = 0
        asked = 0
        while found == asked and self._at < len(self._keys):
            window = self._keys[self._at : self._at + _WINDOW]
            found = count_of(store.match(window), window, store)
            asked = len(window)
            self._at += found
        self._probes_ahead = self._at > before
        return self._probes_ahead

    def release_whole(self) -> bool:
        """Lets the load start on blocks whose keys are all found. Returns True if any are new."""
        keys = self._prompt.keys
        layout = self._prompt.layout
        is_all = self._at == len(self._keys)
        first = self._released
        stop = len(keys) if is_all else self._numbers[self._at]
        if stop <= first:
            return False
        num_bytes = bytes_of(layout, keys, first, self._layer_range)
        num_bytes -= bytes_of(layout, keys, stop, self._layer_range)
        ranges = self._split.ranges(first, stop, num_bytes // self._split.at_once)
        self._work.release(ranges, self._layer_range)
        self._released = stop
        return True


class Follow(Waiter):
    """One load that follows a hand-off. It is a waiter of a `KeyWatch`.

    It searches until all blocks are found, or until P has put the marker `done` or `failed`, or has
    died: a block missing then will never be stored. The found blocks are loaded in any case.

    store: is asked only where P and D meet: of several tiers, the first one.
    block_timeout_s: the search also ends when P has stored no block for so many seconds.
    wake: tells the job queue that the load has new shares, or that no more shares will come.
    clock: returns monotonic seconds, as in `asked_at`.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        work: LoadWork,
        handoff: HandoffId,
        *,
        block_timeout_s: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prompt = work.prompt
        namespace = prompt.keys.namespace
        self.job = job
        self._store = meeting_store_of(store)
        self._work = work
        self._wake = wake
        self._handoff = handoff
        self._namespace = namespace
        self._failed = handoff.failed(namespace)
        self._done = [handoff.done(namespace, n) for n in range(namespace.num_shards)]
        self._clock = clock
        self._moved_at = clock()
        self._has_asked = handoff.instance is not None
        self._pulse = Pulse(namespace, handoff.instance, clock=clock)
        self._block_timeout_s = block_timeout_s
        self._has_sign = False  # the store had a marker, a beat, or a block that was awaited
        self._lanes: list[_Lane] = []
        for n in reversed(prompt.layout.held_ranges):
            self._lanes.append(_Lane(work, n, *self._lanes[-1:]))
        self._lanes.reverse()

    @property
    def is_over(self) -> bool:
        return self.job.done or not self._work.is_open

    def wanted(self) -> list[BlockKey]:
        """Returns the keys to search for; if one of them appears, the watch calls `on_search`."""
        probed = [key for lane in self._lanes if (key := lane.probe_key) is not None]
        return [self._failed, *self._done, *probed, *self._pulse.beat_keys]

    def on_search(self, stored: AbstractSet[BlockKey], asked_at: float) -> float | None:
        """Lets the load start on stored blocks; ends it if P stores no more or is silent."""
        if self.is_over:
            return None
        self._has_sign |= any(key in stored for key in self.wanted())
        self._learn_instance(asked_at)
        self._release(stored, asked_at)
        is_quiet = asked_at - self._moved_at > min(_PROBE_TIMEOUT_S, self._block_timeout_s / 2)
        if is_quiet and any([lane.probe_next_key() for lane in self._lanes]):
            return _MAX_INTERVAL_S  # the next search is for other blocks
        silence = self._silence(stored, asked_at)
        if silence is not None and self._work.is_open:
            self._work.close(silence)
            self._wake()
        return None if self.is_over else _MAX_INTERVAL_S

    def on_search_error(self, error: Exception) -> float | None:
        """Ends the load if the search timed out; ignores another error, as the watch goes on."""
        if isinstance(error, StoreTimeout) and self._work.is_open:
            self._work.close(Reason.STORE_SLOW)  # one such wait is enough for a request
            self._wake()
        return None if self.is_over else _MAX_INTERVAL_S

    def _release(self, stored: AbstractSet[BlockKey], asked_at: float) -> None:
        cut = self._cut(stored)
        moved = False
        try:
            for lane in self._lanes:
                if cut is not None or lane.probe_key in stored:
                    moved |= lane.advance(self._store)
        except StoreError:  # blocks found before it are loaded; the next search finds the rest
            cut = None
        for lane in self._lanes:
            moved |= lane.release_whole()
        if moved:  # P has stored a block, so it is alive
            self._moved_at = asked_at
            self._pulse.add_beat(asked_at)
        is_complete = all(lane.is_complete for lane in self._lanes)
        if is_complete or cut is not None:
            self._work.close(None if is_complete else cut)
        if moved or not self._work.is_open:
            self._wake()

    def _learn_instance(self, asked_at: float) -> None:
        """Reads P's instance id from a marker if the hand-off id lacks it and no block has come."""
        if self._has_asked or asked_at - self._moved_at < _PROBE_TIMEOUT_S:
            return
        try:
            started = read_marker(self._store, self._handoff.started(self._namespace))
        except StoreError:  # the next search tries it again
            return
        self._has_asked = True
        self._has_sign |= started is not None
        instance = self._handoff.instance_of(started) if started is not None else None
        self._pulse = Pulse(self._namespace, instance, clock=self._clock)

    def _cut(self, stored: AbstractSet[BlockKey]) -> Reason | None:
        """Returns the reason if P has said that it stores no more blocks; else None."""
        if self._failed in stored:
            return Reason.HANDOFF_FAILED
        self._done = [key for key in self._done if key not in stored]
        return None if self._done else Reason.ABSENT  # missing blocks were stored, but are lost

    def _silence(self, stored: AbstractSet[BlockKey], asked_at: float) -> Reason | None:
        """Returns the reason if P has been silent for too long; None if more blocks may come."""
        self._pulse.update(stored, asked_at)
        if self._pulse.is_silent():
            return Reason.HANDOFF_DEAD if self._has_sign else Reason.HANDOFF_GONE
        return Reason.HANDOFF_LATE if asked_at - self._moved_at > self._block_timeout_s else None
