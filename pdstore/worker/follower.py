"""Follower: sees what P has stored of hand-offs, and releases it to the loads that follow them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from pdstore.errors import StoreError
from pdstore.format.handoff import HandoffId, Pulse
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
from pdstore.store.base import Store
from pdstore.store.change_listener import ChangeListener, News
from pdstore.store.checked import count_of, stored_among
from pdstore.store.connect import read_marker
from pdstore.store.find import find_optional
from pdstore.store.look_plan import LookPlan
from pdstore.store.optional import FindsKeys, TellsChanges
from pdstore.threads import Deadline, Ticker
from pdstore.worker.block_range import Split
from pdstore.worker.job import Job
from pdstore.worker.load_work import LoadWork
from pdstore.worker.values import PromptBlocks, bytes_of

_WINDOW = 128
"""Keys that one call matches; each is leased, so it is no more than will be loaded soon."""
_FIRST_PAUSE_S = 0.002
_LAST_PAUSE_S = 0.02
_ASK_AFTER_S = 0.1
_TOLD_PAUSE_S = 0.02  # where the store tells of changes: it may not hear of other hosts'


class _Lane:
    """One layer range of a prompt: how far it is stored, and how far that is released."""

    def __init__(self, prompt: PromptBlocks, first_block: int, layer_range: int) -> None:
        self._prompt, self._layer_range = prompt, layer_range
        self._keys, self._numbers = prompt.chain(first_block, layer_range)
        self._at = 0
        self._released = first_block

    @property
    def missing(self) -> BlockKey | None:
        """The first key that is not known to be stored; None if all are."""
        return self._keys[self._at] if self._at < len(self._keys) else None

    @property
    def is_complete(self) -> bool:
        return self._at == len(self._keys) and self._released == len(self._prompt.keys)

    def advance(self, store: Store) -> bool:
        """Matches on from the first missing key. Returns whether any more is stored."""
        before, found, asked = self._at, 0, 0
        while found == asked and self._at < len(self._keys):
            window = self._keys[self._at : self._at + _WINDOW]
            found, asked = count_of(store.match(window), window, store), len(window)
            self._at += found
        return self._at > before

    def release(self, work: LoadWork, split: Split) -> bool:
        """Releases the blocks that are whole in this layer range. Returns whether there are any."""
        keys, layout = self._prompt.keys, self._prompt.layout
        is_all = self._at == len(self._keys)
        first, stop = self._released, len(keys) if is_all else self._numbers[self._at]
        if stop <= first:
            return False
        num_bytes = bytes_of(layout, keys, first, self._layer_range)
        num_bytes -= bytes_of(layout, keys, stop, self._layer_range)
        work.release(split.ranges(first, stop, num_bytes), self._layer_range)
        self._released = stop
        return True


class Follow:
    """One load that follows a hand-off.

    It ends when all is loaded, when P has stored all or failed, or when P has died: then what is
    missing will not come.

    stall_s: the load ends when nothing more is stored for so long.
    wake: tells the queue that the load has more to do, or nothing more.
    clock: counts from when the load was made; `asked_at` goes by it.
    """

    def __init__(
        self,
        job: Job,
        work: LoadWork,
        prompt: PromptBlocks,
        first_block: int,
        handoff: HandoffId,
        *,
        stall_s: float,
        split: Split,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace = prompt.keys.namespace
        self.job, self._work, self._wake = job, work, wake
        self._handoff, self._namespace = handoff, namespace
        self._failed = handoff.failed(namespace)
        self._done = [handoff.done(namespace, n) for n in range(namespace.num_shards)]
        self._clock = clock
        self._moved_at = clock()
        self._pulse: Pulse | None = None
        self._has_asked = handoff.instance is not None
        if handoff.instance is not None:
            self._pulse = Pulse(namespace, handoff.instance, clock=clock)
        self._stall_s, self._split = stall_s, split
        self._lanes = [_Lane(prompt, first_block, n) for n in prompt.layout.held_ranges]
        for n in prompt.layout.held_ranges:
            work.release([], n)  # no token counts before all of its layer ranges are loaded

    @property
    def is_over(self) -> bool:
        return self.job.done or not self._work.is_open

    def wanted(self) -> list[BlockKey]:
        """The keys whose appearance says that there is something to do."""
        missing = [lane.missing for lane in self._lanes]
        beats = self._pulse.ring if self._pulse is not None else []
        return [self._failed, *self._done, *(key for key in missing if key is not None), *beats]

    def hear(self, store: Store, stored: AbstractSet[BlockKey], heard_at: float) -> bool:
        """Releases what is stored; ends the load if P says that it was all. Whether it moved.

        stored: keys that are in the store; those of `wanted` count.
        heard_at: a time at which they were there, in seconds of the clock.
        """
        cut, moved = self._cut(stored), False
        try:
            for lane in self._lanes:
                if cut is not None or lane.missing in stored:
                    moved |= lane.advance(store)
        except StoreError:  # what was found before it is loaded, the rest is asked for again
            cut = None
        for lane in self._lanes:
            moved |= lane.release(self._work, self._split)
        if moved:
            self._note_life(heard_at)
        is_complete = all(lane.is_complete for lane in self._lanes)
        if is_complete or cut is not None:
            self._work.close(None if is_complete else cut)
        if moved or not self._work.is_open:
            self._wake()
        return moved

    def look(self, store: Store, stored: AbstractSet[BlockKey], asked_at: float) -> bool:
        """Does as `hear` after a look for all of `wanted`; ends the load if P says nothing."""
        self._learn_instance(store, asked_at)
        moved = self.hear(store, stored, asked_at)
        silence = self._silence(stored, asked_at)
        if silence is not None and self._work.is_open:
            self._work.close(silence)
            self._wake()
        return moved

    def _learn_instance(self, store: Store, asked_at: float) -> None:
        """Asks once who is P, if a router named the hand-off and nothing came for a moment."""
        if self._has_asked or asked_at - self._moved_at < _ASK_AFTER_S:
            return
        try:
            started = read_marker(store, self._handoff.started(self._namespace))
        except StoreError:  # it is asked again
            return
        self._has_asked = True
        instance = self._handoff.instance_of(started) if started is not None else None
        if instance is not None:
            self._pulse = Pulse(self._namespace, instance, clock=self._clock)

    def _cut(self, stored: AbstractSet[BlockKey]) -> Reason | None:
        """Returns why P says that nothing more will come; None if it does not."""
        if self._failed in stored:
            return Reason.HANDOFF_FAILED
        self._done = [key for key in self._done if key not in stored]
        return None if self._done else Reason.ABSENT  # stored, and lost

    def _note_life(self, heard_at: float) -> None:
        """Takes note that P has stored something."""
        self._moved_at = heard_at
        if self._pulse is not None:
            self._pulse.add_beat(heard_at)

    def _silence(self, stored: AbstractSet[BlockKey], asked_at: float) -> Reason | None:
        """Returns why nothing more is expected of P, which says nothing; None if it is."""
        if self._pulse is not None:
            self._pulse.update(stored, asked_at)
            if self._pulse.is_silent():
                return Reason.HANDOFF_DEAD
        return Reason.HANDOFF_LATE if asked_at - self._moved_at > self._stall_s else None


class Follower:
    """Looks for the next missing values of all following loads, on a thread of its own.

    A look is one call of the store for all loads if the store can look for many keys (`FindsKeys`).
    It follows each change if the store tells of changes (`TellsChanges`). Any other store is
    polled, ever less often while nothing appears.

    stall_s: a load ends when nothing more is stored for so long.
    split: how blocks are shared out among the workers.
    """

    def __init__(self, store: Store, stall_s: float, split: Split) -> None:
        self._store, self._stall_s, self._split = store, stall_s, split
        self._finder = find_optional(store, FindsKeys)
        self._arrivals: deque[Follow] = deque()
        self._follows: list[Follow] = []
        self._pause_s = _FIRST_PAUSE_S
        teller = find_optional(store, TellsChanges)
        self._plan = LookPlan(self._wanted, teller, round_s=_TOLD_PAUSE_S)
        self._listener = None if teller is None else ChangeListener(teller, self._hear)
        self._thread = Ticker("pdstore-follower", self._turn)  # the last: it uses all of these

    def add(
        self,
        job: Job,
        work: LoadWork,
        prompt: PromptBlocks,
        first_block: int,
        handoff: HandoffId,
        wake: Callable[[], None],
    ) -> None:
        """Takes a load that follows a hand-off. From any thread.

        wake: tells the queue that the load has more to do, or nothing more.
        """
        follow = Follow(
            job,
            work,
            prompt,
            first_block,
            handoff,
            stall_s=self._stall_s,
            split=self._split,
            wake=wake,
        )
        self._arrivals.append(follow)
        self._thread.wake()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads; the loads end as their jobs do."""
        limit = Deadline(timeout_s)
        if self._listener is not None:
            self._listener.close(limit.remaining_s())
        self._thread.stop(limit.remaining_s())

    def _hear(self, news: News) -> None:
        self._plan.tell(news)
        self._thread.turn()

    def _turn(self) -> float | None:
        while self._arrivals:
            self._follows.append(self._arrivals.popleft())
            self._pause_s = _FIRST_PAUSE_S
            self._plan.tell(None)
        self._follows = [follow for follow in self._follows if not follow.is_over]
        if self._listener is not None:
            self._listener.listen() if self._follows else self._listener.rest()
        if not self._follows:
            return None
        moved = self._look()
        if self._listener is not None:
            remaining_s = self._plan.remaining_s
            return _TOLD_PAUSE_S if remaining_s is None else remaining_s
        self._pause_s = _FIRST_PAUSE_S if moved else min(1.5 * self._pause_s, _LAST_PAUSE_S)
        return 0.0 if moved else self._pause_s

    def _look(self) -> bool:
        """Takes note of what was named and looks for more. Returns whether any load moved."""
        named, now = self._plan.named(), time.monotonic()
        concerned = [f for f in self._follows if not named.isdisjoint(f.wanted())]
        moved = any([follow.hear(self._store, named, now) for follow in concerned])
        try:
            heard = self._plan.note(self._stored(self._plan.next()))
        except StoreError:  # the loads end when nothing appears in time
            return moved
        if heard is not None:
            now = heard.began_at
            moved |= any([f.look(self._store, heard.found, now) for f in self._follows])
        return moved

    def _wanted(self, _: bool) -> list[BlockKey]:
        return list(dict.fromkeys(key for follow in self._follows for key in follow.wanted()))

    def _stored(self, wanted: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns those of the keys that are stored."""
        if self._finder is not None and wanted:
            return stored_among(self._finder.which_stored(wanted), wanted, self._store)
        return {key for key in wanted if count_of(self._store.match([key]), [key], self._store)}
