"""Promotion: puts values that a load has found below into the first tier, if they are worth it."""

# Decision: docs/decisions/041-admission.md, docs/decisions/047-meeting-tier.md
from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.admission import Admission
from pdstore.store.base import Slots, Store, count_of, num_done_of, stored_among
from pdstore.store.optional import EvictsByUse, FindsKeys
from pdstore.store.tiers.found import Whereabouts, is_for_all_tiers
from pdstore.store.tiers.lower import LowerTier
from pdstore.store.tiers.purges import PurgeWatch, Sample, namespace_of, namespaces_of

Put = Callable[[Sequence[BlockKey], Slots], int]
"""A call of the form of `Store.put`."""


class Prospect(NamedTuple):
    """The chance of values in a lower tier to be promoted by the next load that reads them.

    forbidden: why a purge keeps them below; None if none does.
    oldest_s: seconds since the last use of the value that they would evict from the first tier,
      which each process's admission compares with what it has learnt. None if they need no
      admission: they have room, or the tier does not tell ages.
    """

    forbidden: str | None
    oldest_s: float | None


def prospect_of(
    first: Store, lower: Store, keys: Sequence[BlockKey], sizes: Sequence[int]
) -> Prospect:
    """Returns whether a load would promote values of a lower tier now. Raises StoreError.

    Changes nothing, leases nothing, and knows nothing of other processes' admission.
    """
    watch = PurgeWatch(first, lower)
    forbidden = filter(None, map(watch.why_forbidden, sorted(namespaces_of(keys))))
    return Prospect(next(forbidden, None), _age_to_evict(first.optional(EvictsByUse), sizes))


def _age_to_evict(by_use: EvictsByUse | None, sizes: Sequence[int]) -> float | None:
    """Returns the age of the value that would go for new ones; None if they need no admission.

    A tier that tells no age evicts as it likes, and so it takes all.
    """
    return by_use.oldest_age_s(sizes) if by_use is not None else None


class Promotion:
    """Puts verified values that were found below into the first tier, from their reader's memory.

    It does so if they have room there, or if the admission agrees that they evict the oldest value.
    It evicts nothing by force: values that find no room stay below. Those of which another thread
    is just promoting the same key are left to that thread.

    admission: what this process has learnt of its blocks' uses. While it is None, values are
      promoted only into free room.
    """

    def __init__(self, first: Store, lower: Sequence[LowerTier], found: Whereabouts) -> None:
        self._first = first
        self._lower = lower
        self._found = found
        self._finder = first.optional(FindsKeys)
        self._by_use = first.optional(EvictsByUse)
        self._changed = threading.Condition()
        self._under_way: set[BlockKey] = set()
        self._num_stops = 0
        self._counts: Counter[int] = Counter()
        self._reads = threading.local()  # when the present thread began to read in each tier
        self._to_take_back: set[BlockKey] = set()
        self.admission: Admission | None = None

    @property
    def counts(self) -> Mapping[int, int]:
        """Numbers of values that were promoted so far, by the number of the tier they came from."""
        return self._counts

    def begin_read(self, number: int, keys: Sequence[BlockKey]) -> None:
        """Notes when this thread begins to read values in a lower tier that it may promote.

        Reads the purge numbers the first time that a namespace is read. Later reads do no I/O here,
        as a load passes over a tier that answers late; `promote` reads the numbers again.
        """
        for namespace in namespaces_of(filter(is_for_all_tiers, keys)):
            self._lower[number - 1].purges.learn(namespace)
        # after the numbers were read: else they prove nothing
        vars(self._reads).setdefault("began_at", {}).setdefault(number, time.monotonic())

    def promote(self, keys: Sequence[BlockKey], slots: Slots, put: Put | None = None) -> None:
        """Puts values that were found below into the first tier, if it is worth it.

        Values that a purge forbids are left below, or taken out again. The thread that has read the
        values must make the call.
        put: puts values into the first tier; None: the tier's own put. Raises StoreError.
        """
        began_at = vars(self._reads).pop("began_at", {})
        self._take_back()
        numbers = self._found.which_tier(keys)
        with self._begun([key for key, number in zip(keys, numbers, strict=True) if number]) as own:
            missing = self._missing(own)
            indices = [i for i, key in enumerate(keys) if key in missing]
            chosen = slots.chosen(indices)
            places = {(numbers[i], namespace_of(keys[i])) for i in indices}
            samples = self._samples(places, began_at)
            if indices and samples is not None and self._is_worth_it(chosen.sizes):
                self._put([keys[i] for i in indices], chosen, put or self._first.put, samples)

    @contextlib.contextmanager
    def stopped(self, timeout_s: float) -> Iterator[None]:
        """Waits for promotions under way, at most for `timeout_s`; begins none before the end."""
        with self._changed:
            self._num_stops += 1
            self._changed.wait_for(lambda: not self._under_way, timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._num_stops -= 1

    def _samples(
        self, places: Iterable[tuple[int, str]], began_at: Mapping[int, float]
    ) -> Mapping[tuple[int, str], Sample] | None:
        """Returns the purge numbers of tiers and namespaces; None if a purge forbids promotions.

        None also if this thread has not read in one of the tiers: its value is then of another
        tier, and another thread has found the key here since.
        """
        samples = {}
        for number, namespace in places:
            purges = self._lower[number - 1].purges
            read_at = began_at.get(number)
            sample = None if read_at is None else purges.before_promotion(namespace, read_at)
            if sample is None:
                return None
            samples[number, namespace] = sample
        return samples

    def _may_keep(self, samples: Mapping[tuple[int, str], Sample]) -> bool:
        """True if no purge has begun since these samples."""
        return all(
            self._lower[number - 1].purges.may_keep(namespace, sample)
            for (number, namespace), sample in samples.items()
        )

    def _take_back(self) -> None:
        """Removes what must not stay in the first tier. Raises StoreError; then it stays noted."""
        with self._changed:
            keys = list(self._to_take_back)
            self._to_take_back.clear()  # now: what is noted from now on is not removed by this call
        if not keys:
            return
        try:
            self._first.remove(keys)
        except StoreError:
            with self._changed:
                self._to_take_back.update(keys)
            raise

    @contextlib.contextmanager
    def _begun(self, keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
        """Marks keys as being promoted; gives those that no other thread promotes."""
        with self._changed:
            begun = [] if self._num_stops else [key for key in keys if key not in self._under_way]
            self._under_way.update(begun)
        try:
            yield begun
        finally:
            with self._changed:
                self._under_way.difference_update(begun)
                self._changed.notify_all()

    def _missing(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns those that the first tier lacks; notes that it has the others."""
        if not keys or self._finder is None:
            return set(keys)
        stored = stored_among(self._finder.which_stored(keys), keys, self._first)
        self._found.note(0, [key for key in keys if key in stored])
        return set(keys) - stored

    def _is_worth_it(self, sizes: Sequence[int]) -> bool:
        """True if the values have room, or may evict the oldest one."""
        oldest_s = _age_to_evict(self._by_use, sizes)
        if oldest_s is None:
            return True
        return self.admission is not None and self.admission.admits(oldest_s)

    def _put(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        put: Put,
        samples: Mapping[tuple[int, str], Sample],
    ) -> None:
        """Puts values into the first tier, and takes them out again if a purge began meanwhile."""
        num_taken = 0
        try:
            num_taken = count_of(put(keys, slots), keys, self._first)
        except StoreError as error:
            num_taken = num_done_of(error, keys)
            raise
        finally:
            if self._may_keep(samples):
                self._note_promoted(keys[:num_taken])
            else:
                with self._changed:
                    self._to_take_back.update(keys)  # a put that failed may have stored more
                self._take_back()

    def _note_promoted(self, keys: Sequence[BlockKey]) -> None:
        with self._changed:
            self._counts.update(filter(None, self._found.which_tier(keys)))
        self._found.note_promoted(keys)
