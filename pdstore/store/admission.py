"""Admission: decides whether a save may evict values; learns at what ages blocks are used again.

Decision: hit density decides (LHD, Beckmann et al., NSDI 2018). The hit density of a value is its
expected hits divided by the seconds for which the pool has to hold it to get them. The seconds are
those for which this quotient is largest (Gittins' index). A save may evict if the hit density of
its new values is at least that of the pool's oldest value, which has an age already. When users
take turns, every block is used again at about the same age, so the oldest block is the next to be
used. A small pool that evicts it has almost no hits, so the save is refused. If older values are
less likely to be used, every save may evict: the policy is then plain LRU. A value that nobody uses
any more becomes older than any age at which a use was seen, and is evicted: no value stays for
ever. An age runs from a use to the next lookup, not to the load that follows it: how long a request
waits in between says nothing about when its user comes back. `benchmarks.trace.eviction` compares
policies.
Decision: docs/decisions/041-admission.md
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pdstore.store.base import FRESH_S

_MAX_SAMPLES = 2048
_MAX_PENDING = 64  # calls of `found` that are kept until the next save: the last ones
_LEARN_EVERY = 256  # sampled uses between two calls of `_learn`, which takes half a millisecond
_OF_ALL = 0  # where the counts of all intervals stand
_OF_NEW = 1  # and those of intervals that begin with a save
_HORIZON = 64  # a sample that is so many times as old as the pool's oldest value is forgotten
_PER_OCTAVE = 6
_EDGES = [0.0] + [FRESH_S * 2 ** (i / _PER_OCTAVE) for i in range(22 * _PER_OCTAVE)]
_NUM_AGES = len(_EDGES) - 1  # ages are counted by the interval between two edges
_ALL_NAMES = 1 << 32


class Admission:
    """Learns at what ages this process uses blocks again; decides which of its saves may evict.

    Any thread may call it. It remembers a few thousand of the names (prefix hashes) of blocks, even
    of blocks that were evicted or not admitted. The names themselves decide which ones it
    remembers, so that all ranks of an instance remember the same ones.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: deque[tuple[float, Iterable[bytes], float]] = deque(maxlen=_MAX_PENDING)
        self._samples: dict[bytes, tuple[float, bool]] = {}  # the last use: time, is a save
        self._names_below = _ALL_NAMES  # only names whose first four bytes are less are remembered
        # numbers of intervals by age: [0] of all, [1] of those that began with a save;
        # `_hits` counts the intervals that a use has ended, `_ends` all that have ended
        self._hits, self._ends = ([[0.0] * _NUM_AGES for _ in range(2)] for _ in range(2))
        self._num_ends = 0.0
        self._num_uses = 0
        self._oldest_s = 0.0  # the greatest argument of recent calls of `admits`
        # copies made by the last `_learn`
        self._of_all = [*self._hits[_OF_ALL]], [*self._ends[_OF_ALL]]
        self._of_new = 0.0

    def found(self, names: Iterable[bytes], waited_s: float = 0.0) -> None:
        """Notes a use of blocks in the pool. Iterates `names` only at a save: loads are urgent.

        waited_s: how long ago the request's prompt was looked up first.
        """
        self._pending.append((self._clock(), names, waited_s))

    def saved(self, names: Iterable[bytes], waited_s: float = 0.0) -> None:
        """Notes a use of blocks that were not in the pool, also if their save is not admitted.

        waited_s: as `found` takes it.
        """
        now = self._clock()
        with self._lock:
            while self._pending:
                self._use(*self._pending.popleft(), is_save=False)
            self._use(now, names, waited_s, is_save=True)
            if len(self._samples) > _MAX_SAMPLES:
                self._forget(now)

    def admits(self, oldest_s: float) -> bool:
        """Returns whether new values may evict the oldest value, unused for `oldest_s` seconds."""
        with self._lock:
            if self._num_uses >= _LEARN_EVERY:
                self._learn(self._clock())
            self._oldest_s = max(0.99 * self._oldest_s, oldest_s)
            return self._of_new >= hit_density(*self._of_all, _age(oldest_s))

    def _use(self, now: float, names: Iterable[bytes], waited_s: float, *, is_save: bool) -> None:
        asked_at = now - waited_s
        for name in names:
            if int.from_bytes(name[:4], "big") >= self._names_below:
                continue
            before = self._samples.pop(name, None)
            kind = is_save
            if before is not None and asked_at - before[0] <= FRESH_S:
                # One use, also if the request came before the last one and has waited since. So
                # nothing is learnt of a prefix that is used more often than requests wait. That is
                # no loss: it is never the oldest value, and for that one only hits at its age and
                # above count. With these uses counted as hits at age 0, closed loops in which users
                # share a prefix find from 1 % more (all share 2k tokens) to 5 % less (four share
                # 8k, pool of 1/4): such hits say that any new value is worth more than an old one.
                kind = before[1]
            elif before is not None:
                self._end(asked_at, *before, hits=1)
            self._samples[name] = now, kind
            self._num_uses += 1

    def _end(self, now: float, used_at: float, is_save: bool, hits: int = 0) -> None:
        age = _age(now - used_at)
        for series in (_OF_ALL, _OF_NEW) if is_save else (_OF_ALL,):
            self._hits[series][age] += hits
            self._ends[series][age] += 1
        self._num_ends += 1
        if self._num_ends >= _MAX_SAMPLES:  # so older intervals count less
            self._num_ends /= 2
            for counts in (*self._hits, *self._ends):
                counts[:] = [count / 2 for count in counts]

    def _learn(self, now: float) -> None:
        self._num_uses = 0
        self._forget(now)
        ends = [list(counts) for counts in self._ends]
        for used_at, is_save in self._samples.values():  # intervals not ended yet
            for series in (_OF_ALL, _OF_NEW) if is_save else (_OF_ALL,):
                ends[series][_age(now - used_at)] += 1
        self._of_all = [*self._hits[_OF_ALL]], ends[_OF_ALL]
        self._of_new = hit_density(self._hits[_OF_NEW], ends[_OF_NEW], 0)

    def _forget(self, now: float) -> None:
        """Forgets samples not used for long; adapts how large a fraction of names is sampled."""
        since = now - _HORIZON * self._oldest_s if self._oldest_s else -math.inf
        for name, sample in list(self._samples.items()):  # those used longest ago come first
            if sample[0] >= since:
                break
            self._end(now, *self._samples.pop(name))
        if len(self._samples) < _MAX_SAMPLES // 4:
            self._names_below = min(_ALL_NAMES, 2 * self._names_below)
        while len(self._samples) > _MAX_SAMPLES:
            self._names_below = below = self._names_below // 2
            kept = self._samples.items()
            self._samples = {n: s for n, s in kept if int.from_bytes(n[:4], "big") < below}


def hit_density(hits: Sequence[float], ends: Sequence[float], age: int) -> float:
    """Returns the hits per second that a value of this age brings if held for the best time.

    hits, ends: how many intervals between uses ended at each age by a use, and in any way.
    """
    at_risk = sum(ends[age:])
    alive = 1.0
    best = num_hits = held_s = 0.0
    for i in range(age, _NUM_AGES):
        hit_rate = hits[i] / at_risk if at_risk > 0.5 else 0.0
        num_hits += alive * hit_rate
        held_s += alive * (1 - hit_rate / 2) * (_EDGES[i + 1] - _EDGES[i])
        best = max(best, num_hits / held_s)
        alive *= 1 - hit_rate
        at_risk -= ends[i]
    return best


def _age(seconds: float) -> int:
    """Returns which interval of `_EDGES` an age lies in."""
    return min(_NUM_AGES - 1, max(0, bisect_left(_EDGES, seconds) - 1))
