"""Purge numbers: they keep copies between tiers from bringing back what was purged meanwhile.

A namespace's number in a store is how many of the keys `purge_key(namespace, 1)`, 2, 3 and so on
are stored there. A purge takes an odd number of its own before it clears, and stores the even one
behind it when all is cleared. So a copy that reads the same even number before and after itself, in
both of its tiers, ran beside no purge.
"""

# Decision: docs/decisions/050-purge-numbers.md
from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from pdstore.errors import BadValue, StoreError, StoreFull
from pdstore.format import block
from pdstore.format.keys import HASH_BYTES, HEX_ID, PURGE_PREFIX, BlockKey, prefix_of
from pdstore.store.base import Slots, Store, count_of
from pdstore.store.optional import ListsValues

A = TypeVar("A")

log = logging.getLogger(__name__)

LATE_S = 2.0
"""Seconds that a purge waits before it clears.

A process that is killed between a copy and its second look takes nothing back. So the purge lets
copies that began before it end first: it then clears what they have stored.
"""
FRESH_S = 1.0  # for which the numbers that one promotion read serve the next ones
_MOST_KEYS = 1024  # in one search for the last number
_MOST_TRIES = 100
_NAMESPACE = slice(5, 5 + 2 * HASH_BYTES)  # of a block's key: `pds1:` and 32 hex digits


def purge_key(namespace: str, number: int) -> BlockKey:
    """Returns the key of one of a namespace's purge numbers."""
    return BlockKey(f"{PURGE_PREFIX}{namespace}:{number}")


def purged_namespaces(store: Store) -> set[str]:
    """Returns the namespaces that have a purge number in a store; none if it cannot list them.

    Reads every key of the pool. Raises StoreError.
    """
    lists = store.optional(ListsValues)
    keys = lists.stored_values(PURGE_PREFIX) if lists is not None else ()
    found = {value.key.removeprefix(PURGE_PREFIX).partition(":")[0] for value in keys}
    return set(filter(HEX_ID.fullmatch, found))


def namespaces_of(keys: Iterable[BlockKey]) -> set[str]:
    """Returns the namespaces that the keys of blocks name."""
    return set(map(namespace_of, keys))


def namespace_of(key: BlockKey) -> str:
    """Returns the namespace that a block's key names."""
    return key[_NAMESPACE]


class PurgeNumbers:
    """The purge numbers in one store. Any thread may call it; its calls raise StoreError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last: dict[str, int] = {}

    def last(self, namespace: str) -> int:
        """Returns the last number of a namespace; 0 if it was never purged.

        One search of two keys, unless another process has purged since this one looked last.
        """
        start = max(self._last.get(namespace, 0), 1)
        found = self._match(namespace, start, 2)
        last = start + found - 1
        if found == 2 or (found == 0 and start > 1):  # there are more, or the store has lost them
            last = self._search(namespace, last if found else 0)
        self._last[namespace] = last
        return last

    def put(self, namespace: str, number: int, token: bytes) -> bool:
        """Stores the missing numbers up to one; returns True if that one bears the caller's token.

        A store that has no room is cleared of the namespace first.
        """
        first = self.last(namespace) + 1
        keys = [purge_key(namespace, n) for n in range(first, number + 1)]
        if keys:
            header = block.Header(block.FLAG_MARKER, 0, 0, 1, 0, 0, bytes.fromhex(namespace), token)
            slots = self._slots(len(keys))
            for i in range(len(keys)):
                block.seal(slots.value(i), header)
            try:
                self.store.put(keys, slots)
            except StoreFull:
                self.store.clear(namespace)
                self.store.put(keys, slots)
        return self._token(purge_key(namespace, number)) == token

    def _search(self, namespace: str, last: int) -> int:
        """Returns the last number if all up to `last` are stored; each search takes more keys."""
        found = count = 1
        while found == count:
            count = min(2 * count, _MOST_KEYS)
            found = self._match(namespace, last + 1, count)
            last += found
        return last

    def _match(self, namespace: str, first: int, count: int) -> int:
        keys = [purge_key(namespace, n) for n in range(first, first + count)]
        return count_of(self.store.match(keys), keys, self.store)

    def _token(self, key: BlockKey) -> bytes | None:
        """Returns the token of the purge that has stored a number; None if the value is damaged."""
        slots = self._slots(1)
        with suppress(BadValue):
            if count_of(self.store.get([key], slots), [key], self.store) == 0:
                raise StoreError(f"{self.store.label} does not keep purge numbers")
            header = block.read_header(slots.value(0))
            return header.prefix_hash if header is not None else None
        return None

    def _slots(self, count: int) -> Slots:
        size = block.HEADER_BYTES
        memory = self.store.allocate(-(-count * size // 4096) * 4096)
        return Slots(memory, size, range(count), [size] * count)


class Purge:
    """One purge of a namespace in all tiers: `begin`, then clear each tier, then `end`.

    first, lower: the numbers in the first tier, and in each lower one.
    number: the odd number that this purge has taken.
    """

    def __init__(self, namespace: str, first: PurgeNumbers, lower: Sequence[PurgeNumbers]) -> None:
        self._namespace = namespace
        self._first = first
        self._lower = list(lower)
        self._token = secrets.token_bytes(HASH_BYTES)
        self.number = 0

    def begin(self) -> list[StoreError]:
        """Takes an odd number in every tier that answers; returns the errors of lower tiers.

        If a lower tier has a later number than the first one, another host has purged it. Then this
        purge ends that one for the first tier, with the same number: a new number would make every
        other host purge again. Raises the first tier's StoreError.
        """
        failed: list[StoreError] = []
        for i in range(_MOST_TRIES):
            first, last = self._first.last(self._namespace), self._last_below(failed)
            is_part = i == 0 and first < last and last % 2 == 0
            self.number = last - 1 if is_part else (max(first, last) + 1) // 2 * 2 + 1
            if self._is_taken(failed, is_part=is_part):
                return failed
        raise StoreError(f"{self._first.store.label}: no purge number is free; purge again")

    def end(self, cleared: Sequence[PurgeNumbers]) -> list[StoreError]:
        """Stores the even number in the tiers that are cleared; returns the errors of lower ones.

        Raises the first tier's StoreError.
        """
        failed: list[StoreError] = []
        self._lower = [tier for tier in self._lower if tier in cleared]
        number = self.number + 1
        self._on_each_lower(lambda tier: tier.put(self._namespace, number, self._token), failed)
        self._first.put(self._namespace, number, self._token)
        return failed

    def _last_below(self, failed: list[StoreError]) -> int:
        numbers = [0]
        self._on_each_lower(lambda tier: numbers.append(tier.last(self._namespace)), failed)
        return max(numbers)

    def _is_taken(self, failed: list[StoreError], *, is_part: bool) -> bool:
        """Stores the number in each tier; returns True if no other purge has it in any of them.

        is_part: True if a tier may have a later number already.
        """
        is_own: list[bool] = []

        def put(tier: PurgeNumbers) -> None:
            has_later = is_part and tier.last(self._namespace) > self.number
            is_own.append(has_later or tier.put(self._namespace, self.number, self._token))

        self._on_each_lower(put, failed)
        return all(is_own) and self._first.put(self._namespace, self.number, self._token)

    def _on_each_lower(
        self, call: Callable[[PurgeNumbers], object], failed: list[StoreError]
    ) -> None:
        """Makes a call for each lower tier, and leaves out those that fail from then on."""
        for tier in [*self._lower]:
            error = error_of(partial(call, tier))
            if error is not None:
                self._lower.remove(tier)
                failed.append(error)


def error_of(call: Callable[[], object]) -> StoreError | None:
    """Makes a call; returns its StoreError, None if it has succeeded."""
    try:
        call()
    except StoreError as error:
        return error
    return None


class Sample(NamedTuple):
    """The numbers of one namespace in the first tier and in a lower one, read together."""

    first: int
    lower: int

    @property
    def is_quiet(self) -> bool:
        """True if no purge is under way, or was broken off, and both tiers have had each one."""
        return self.first == self.lower and self.first % 2 == 0

    @property
    def is_missed_below(self) -> bool:
        """True if the lower tier lacks a purge that has ended in the first tier."""
        return self.lower < self.first and self.first % 2 == 0

    @property
    def is_missed_above(self) -> bool:
        """True if the first tier lacks a purge of the lower one, and none is under way in it."""
        return self.first < self.lower and self.first % 2 == 0


class _Known(NamedTuple):
    """The sample of a namespace that was read last, when, and since when it has been the same."""

    sample: Sample
    since: float
    read_at: float


Look = Callable[[Callable[[], Any], Any], Any]
"""Makes a search of the lower tier within its time limit; else returns the second argument."""


class PurgeWatch:
    """Tells copies between the first tier and one lower tier whether a purge forbids them.

    Copies in both directions read a sample of the numbers before they read a value, and compare it
    with a new one after they have stored it. If the numbers differ, they take the value back. A
    sample that is not quiet forbids them altogether. Any thread may call it.

    - The first tier's number is older: another host has purged. This host's first tier may still
      have what was purged, until somebody purges here, too.
    - The lower tier's number is older: it was down during the purge, or has lost its values. Before
      the next copy, the copier clears the namespace there.
    - A number is odd: a purge is under way, or was broken off. The next purge ends that.

    look: makes searches for callers who must not wait for a lower tier that hangs; None if there
      is no time limit.
    """

    def __init__(self, first: Store, lower: Store, look: Look | None = None) -> None:
        self.first = PurgeNumbers(first)
        self.lower = PurgeNumbers(lower)
        self._look = look
        self._lock = threading.Lock()
        self._adopted: set[str] = set()
        self._refused: dict[str, Sample] = {}
        self._known: dict[str, _Known] = {}

    def sample(self, namespace: str) -> Sample:
        """Reads the numbers of a namespace now. Raises StoreError."""
        return self._noted(namespace, self.first.last(namespace), self.lower.last(namespace))

    def _sample_in_time(self, namespace: str) -> Sample | None:
        """Does what `sample` does; returns None if that fails, or the lower tier is late."""
        with suppress(StoreError):
            first = self.first.last(namespace)  # outside the limit: it is not the lower tier's time
            lower = self._within_limit(partial(self.lower.last, namespace))
            return None if lower is None else self._noted(namespace, first, lower)
        return None

    def _noted(self, namespace: str, first: int, lower: int) -> Sample:
        sample = Sample(first, lower)
        with self._lock:
            if sample.is_quiet:
                self._refused.pop(namespace, None)
            else:
                self._refused[namespace] = sample
        return sample

    def adopt(self, namespaces: Iterable[str], *, waits: bool = False) -> None:
        """Gives the first tier the lower one's number if it has nothing of a namespace yet.

        So a first tier that is new, as after a restart of its host, need not be purged. It is
        called before the first put of a namespace, and before a purge; later calls do no I/O. A
        first tier that cannot list its values is not believed to be new.
        waits: True if the caller waits for the lower tier as long as that takes.
        """
        for namespace in set(namespaces) - self._adopted:
            search = partial(self.lower.last, namespace)
            with suppress(StoreError):
                last = search() if waits else self._within_limit(search)
                if last is None:
                    continue
                if self.may_adopt(namespace, Sample(self.first.last(namespace), last)):
                    self.first.put(namespace, last, secrets.token_bytes(HASH_BYTES))
                self._adopted.add(namespace)

    def before_copies(self, namespaces: Iterable[str]) -> Mapping[str, Sample] | None:
        """Returns samples for values that are to be copied down; None if a purge forbids it.

        Raises StoreError.
        """
        samples = {}
        for namespace in namespaces:
            sample = self.sample(namespace)
            if sample.is_missed_below:
                self._complete(namespace, sample.first)
                sample = self.sample(namespace)
            if not sample.is_quiet:
                return None
            samples[namespace] = sample
        return samples

    def are_current(self, samples: Mapping[str, Sample]) -> bool:
        """True if no purge has begun since these samples. Raises StoreError."""
        return all(self.sample(namespace) == each for namespace, each in samples.items())

    def learn(self, namespace: str) -> None:
        """Reads the numbers of a namespace for later promotions, unless they were read before."""
        if namespace not in self._known:
            self.before_promotion(namespace)

    def before_promotion(self, namespace: str, read_at: float | None = None) -> Sample | None:
        """Returns a sample for values that are to be copied up; None if a purge forbids it.

        Reads the numbers at most once in a second, so it may be called at every load; with an older
        sample, more purges are noticed. If the lower tier does not answer in time, returns None.
        read_at: when the first of the values was read (monotonic), if that was before this call.
          Then the result is None also if these numbers were not seen before.
        """
        now = time.monotonic()
        known = self._known.get(namespace)
        if known is None or now - known.read_at > FRESH_S:
            self.adopt([namespace])
            sample = self._sample_in_time(namespace)
            if sample is None:
                return None
            is_same = known is not None and known.sample == sample
            known = _Known(sample, known.since if known is not None and is_same else now, now)
            self._known[namespace] = known
        is_old = read_at is None or known.since <= read_at
        return known.sample if is_old and known.sample.is_quiet else None

    def may_keep(self, namespace: str, sample: Sample) -> bool:
        """True if values may stay in the first tier that were copied up after this sample.

        Reads the numbers anew: two searches for each call. False also if that takes too long.
        """
        return self._sample_in_time(namespace) == sample

    def problem(self) -> str | None:
        """Returns what to do about a namespace of which nothing is copied; None if all is well.

        Does I/O only while a namespace is refused.
        """
        for namespace in list(self._refused):
            sample = self._sample_in_time(namespace)
            if sample is not None and not sample.is_quiet:
                return self.why_refused(namespace, sample)
        return None

    def why_forbidden(self, namespace: str) -> str | None:
        """Returns why nothing of a namespace is copied now; None if it is. Raises StoreError.

        Changes nothing: a first tier that is new takes over the lower one's number at its next put.
        """
        sample = self.sample(namespace)
        if sample.is_quiet or self.may_adopt(namespace, sample):
            return None
        return self.why_refused(namespace, sample)

    def why_refused(self, namespace: str, sample: Sample) -> str:
        """Returns why a sample that is not quiet forbids copies, and what ends that."""
        if sample.is_missed_below:
            return (
                f"{self.lower.store.label} has missed a purge of the namespace {namespace}: it is"
                " cleared before the next copy"
            )
        why = (
            "was purged on another host, not here"
            if sample.is_missed_above
            else "is being purged, or its purge was broken off"
        )
        return (
            f"the namespace {namespace} {why}: nothing of it is copied to or from"
            f" {self.lower.store.label} until `pdstore purge --namespace {namespace}` is run here"
        )

    def _within_limit(self, search: Callable[[], A]) -> A | None:
        """Makes a search; returns None if it fails or takes too long."""
        if self._look is not None:
            return cast("A | None", self._look(search, None))
        with suppress(StoreError):
            return search()
        return None

    def may_adopt(self, namespace: str, sample: Sample) -> bool:
        """True if the first tier is new: it lacks the lower one's number, and has no value.

        Raises StoreError.
        """
        lists = self.first.store.optional(ListsValues)
        if sample.first >= sample.lower or sample.first % 2 or sample.lower % 2 or lists is None:
            return False
        return next(iter(lists.stored_values(prefix_of(namespace))), None) is None

    def _complete(self, namespace: str, number: int) -> None:
        """Makes up for a purge that the lower tier has missed. Raises StoreError."""
        token = secrets.token_bytes(HASH_BYTES)
        log.warning("%s has missed a purge of %s: cleared now", self.lower.store.label, namespace)
        self.lower.put(namespace, number - 1, token)
        self.lower.store.clear(namespace)
        self.lower.put(namespace, number, token)
