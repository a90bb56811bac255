"""Admission: whether a save may evict what the pool holds, learnt from when blocks are used again.

Decision: hit density decides (LHD, Beckmann et al., NSDI 2018): the hits a second of holding a
value, for the time for which that is best (Gittins' index). That of a new value is compared with
that of the pool's oldest, which has an age already. Users who ask in turn use blocks again at much
the same age: the oldest is next to be used, and a pool smaller than what they have finds next to
nothing if it goes. So the save is refused. Where chances fall with age every save is admitted:
plain LRU. What is no longer used grows older than any use that was seen, so nothing stays for good.
A fixed time of protection suits one workload only; `benchmarks.trace.eviction` compares them.
Decision: docs/decisions/041-admission.md
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from pdstore.store.base import FRESH_S

_MOST_SAMPLES = 4096
_MOST_PENDING = 64  # loads between two saves; of more the last ones count
_LEARN_EVERY = 256  # sampled uses; a look at all samples takes a millisecond
_HORIZON = 64  # ages of the pool's oldest value: what is unused for longer is forgotten
_PER_OCTAVE = 6
_EDGES = [0.0] + [FRESH_S * 2 ** (i / _PER_OCTAVE) for i in range(22 * _PER_OCTAVE)]
_NUM_AGES = len(_EDGES) - 1  # the last goes on for ever
_ALL_NAMES = 1 << 32

_Ages = list[float]
"""Counts for each bucket of ages, which are a twelfth wide and more."""


class Density:
    """The hits that values bring at each age, and the seconds for which they are held for them.

    hits, ended: intervals between uses, by age, that ended with a use; and without one so far.
    """

    def __init__(self, hits: _Ages, ended: _Ages) -> None:
        at_risk, alive = sum(hits) + sum(ended), 1.0
        self._hits: _Ages = []
        self._held_s: _Ages = []
        for hit, end, (start_s, stop_s) in zip(hits, ended, pairwise(_EDGES), strict=True):
            share = hit / at_risk if at_risk > 0.5 else 0.0
            self._hits.append(alive * share)
            self._held_s.append(alive * (1 - share / 2) * (stop_s - start_s))
            alive *= 1 - share
            at_risk -= hit + end

    def best_from(self, age: int) -> float:
        """Returns the hits a second of a value of this age, held for the time that is best."""
        best = hits = held_s = 0.0
        for hit, seconds in zip(self._hits[age:], self._held_s[age:], strict=True):
            hits += hit
            held_s += seconds
            best = max(best, hits / held_s) if held_s > 0 else best
        return best


class Admission:
    """What this process has seen of blocks' uses, and what follows for its saves. For any thread.

    It remembers a sample of a few thousand names, also of blocks that were evicted or refused. The
    sample is chosen by the names, so the ranks of an instance have the same one.

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: dict[bytes, tuple[float, bool]] = {}  # the last use, and whether a save
        self._pending: deque[tuple[float, Sequence[bytes]]] = deque(maxlen=_MOST_PENDING)
        self._names_below = _ALL_NAMES
        self._hits = {kind: [0.0] * _NUM_AGES for kind in (False, True)}
        self._ended = {kind: [0.0] * _NUM_AGES for kind in (False, True)}
        self._num_ended = 0.0
        self._num_uses = 0
        self._oldest_s = 0.0  # the greatest age asked about lately
        self._of_all: Density | None = None
        self._of_new = 0.0

    @property
    def num_samples(self) -> int:
        """The number of names that are remembered."""
        return len(self._samples)

    def found(self, names: Sequence[bytes]) -> None:
        """Notes a use of blocks that were in the pool; at once, because somebody waits for them.

        names: their prefix hashes.
        """
        self._pending.append((self._clock(), names))

    def saved(self, names: Sequence[bytes]) -> None:
        """Notes a use of blocks that were not in the pool, whether they are admitted or not."""
        now = self._clock()
        with self._lock:
            while self._pending:
                used_at, found = self._pending.popleft()
                self._use(found, used_at, is_save=False)
            self._use(names, now, is_save=True)
            if self._num_uses >= _LEARN_EVERY:
                self._learn(now)

    def admits(self, oldest_s: float) -> bool:
        """Returns whether new values are worth the pool's oldest, last used `oldest_s` ago."""
        with self._lock:
            self._oldest_s = max(self._oldest_s, oldest_s)
            return self._of_all is None or self._of_new >= self._of_all.best_from(_age(oldest_s))

    def _use(self, names: Sequence[bytes], now: float, *, is_save: bool) -> None:
        for name in names:
            if int.from_bytes(name[:4], "big") >= self._names_below:
                continue
            before = self._samples.pop(name, None)
            kind = is_save
            if before is not None and now - before[0] <= FRESH_S:  # one use, as far as a pool goes
                kind = before[1]
            elif before is not None:
                self._end(self._hits, now, *before)
            self._samples[name] = now, kind
            self._num_uses += 1

    def _end(self, how: dict[bool, _Ages], now: float, used_at: float, is_save: bool) -> None:
        how[is_save][_age(now - used_at)] += 1
        self._num_ended += 1
        if self._num_ended >= _MOST_SAMPLES:  # what was long ago counts for less and less
            self._num_ended /= 2
            for counts in (*self._hits.values(), *self._ended.values()):
                counts[:] = [count / 2 for count in counts]

    def _learn(self, now: float) -> None:
        self._num_uses = 0
        self._forget(now)
        ended = {is_save: list(counts) for is_save, counts in self._ended.items()}
        for used_at, is_save in self._samples.values():
            ended[is_save][_age(now - used_at)] += 1
        self._of_new = Density(self._hits[True], ended[True]).best_from(0)
        self._of_all = Density(_sum(self._hits), _sum(ended))

    def _forget(self, now: float) -> None:
        """Forgets what was not used for long; changes the share of the names that are sampled."""
        if self._oldest_s:
            since = now - _HORIZON * self._oldest_s
            for name, sample in list(self._samples.items()):  # those used longest ago come first
                if sample[0] >= since:
                    break
                self._end(self._ended, now, *self._samples.pop(name))
        self._oldest_s *= 0.9
        if len(self._samples) < _MOST_SAMPLES // 4:
            self._names_below = min(_ALL_NAMES, 2 * self._names_below)
        while len(self._samples) > _MOST_SAMPLES:
            self._names_below //= 2
            kept = self._samples.items()
            below = self._names_below
            self._samples = {n: s for n, s in kept if int.from_bytes(n[:4], "big") < below}


def _sum(counts: dict[bool, _Ages]) -> _Ages:
    return [a + b for a, b in zip(*counts.values(), strict=True)]


def _age(seconds: float) -> int:
    """Returns the bucket of an age."""
    octaves = math.log2(max(seconds, FRESH_S) / FRESH_S)
    return min(_NUM_AGES - 1, math.ceil(octaves * _PER_OCTAVE))
