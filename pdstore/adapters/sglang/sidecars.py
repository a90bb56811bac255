"""SidecarLookup: after which pages SGLang can go on with what is stored beside the KV of a prompt.

A sidecar is a host pool beside that of KV. SGLang needs of it either all pages of a prefix, such as
those of an indexer, or only the last ones: of a sliding window, or of a state, which is one page.
So a long prefix may be restorable although a shorter one is not.
"""

# Decision: docs/decisions/034-sglang-pages.md
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdstore.errors import Reason, StoreError, reason_of
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.metrics import Metrics
from pdstore.scheduler.lookup import Lookup, LookupQueue, Match
from pdstore.settings import LOOKUP_TIMEOUT_S
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import FindsKeys

_MAX_ASKED = 8  # so many lengths are asked for one after the other


@dataclass(frozen=True)
class Sidecar:
    """The pages of a sidecar that SGLang needs to go on after some pages of a prompt.

    name: SGLang's name of the host pool.
    keys: the keys of the prompt's pages in this pool.
    num_last: how many of the last pages it needs; None for all pages.
    """

    name: str
    keys: PromptKeys
    num_last: int | None

    def wanted(self, num_pages: int) -> list[BlockKey]:
        """Returns the keys of what SGLang needs to go on after so many pages."""
        first = 0 if self.num_last is None else max(0, num_pages - self.num_last)
        return self.keys.store_keys(self.keys.namespace.parts, first, num_pages)

    def lengths(self, num_pages: int, stored: set[BlockKey]) -> list[int]:
        """Returns after how many of the first pages SGLang can go on, in ascending order."""
        found = []
        run = 0  # so many pages are stored before this one, without a gap
        for length in range(1, num_pages + 1):
            page = self.keys.store_keys(self.keys.namespace.parts, length - 1, length)
            run = run + 1 if stored.issuperset(page) else 0
            if run >= (length if self.num_last is None else min(length, self.num_last)):
                found.append(length)
        return found


@dataclass
class Restorable:
    """After how many pages of a prompt SGLang can go on.

    lengths: these numbers, in ascending order.
    by_pool: by a host pool's name, the largest number if only this pool is asked; not those of
      which it is not known, or is 0.
    """

    lengths: list[int] = field(default_factory=list)
    by_pool: dict[str, int] = field(default_factory=dict)


class SidecarLookup:
    """Asks the store what it has of a prompt in the sidecars.

    One thread may call `find`; any thread may call `close`.
    """

    def __init__(self, store: Store, metrics: Metrics, timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        self._store = store
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._queue = LookupQueue(self._answer, timeout_s)
        self._asked: tuple[Sequence[Sidecar], Restorable] = ((), Restorable())

    def find(self, keys: PromptKeys, sidecars: Sequence[Sidecar]) -> Restorable:
        """Returns after how many pages SGLang can go on, of those whose KV is stored.

        Nothing is restorable if the store fails or takes too long. The store has leased what the
        last of these pages needs.
        keys: of the leading pages whose KV is stored, of which there is at least one.
        """
        found = Restorable()
        if self._queue.is_stuck:
            self._metrics.miss(Reason.STORE_SLOW)
            return found
        self._asked = (sidecars, found)
        lookup = Lookup(keys, None, self._timeout_s, self._count)
        self._queue.add(lookup)
        ended = lookup.wait(2 * self._timeout_s)  # it ends sooner, at its own deadline
        is_answer = ended.reason in (None, Reason.ABSENT)  # else the call may still fill it
        return found if is_answer else Restorable()

    def close(self) -> None:
        """Ends a running call. A second call does nothing."""
        self._queue.close()

    def _count(self, found: Match) -> None:
        if found.reason is not None:
            self._metrics.miss(found.reason)

    def _answer(self, keys: PromptKeys) -> Match:
        sidecars, found = self._asked
        try:
            by_length = restorable(self._store, len(keys), sidecars)
        except StoreError as error:
            return Match.miss(keys, reason_of(error), error)
        found.lengths = by_length.lengths
        found.by_pool = by_length.by_pool
        num_tokens = keys.end_of(found.lengths[-1]) if found.lengths else 0
        reason = None if num_tokens == keys.num_tokens else Reason.ABSENT
        return Match(keys.prefix(num_tokens), num_tokens, reason)


def restorable(store: Store, num_pages: int, sidecars: Sequence[Sidecar]) -> Restorable:
    """Returns after how many of the first pages SGLang can go on, as far as sidecars are needed.

    One search asks for every page, and a match leases what the last of them needs. A store that
    cannot search is asked for the last few lengths. Raises StoreError.
    """
    finder = store.optional(FindsKeys)
    if finder is None:
        asked = range(num_pages, max(0, num_pages - _MAX_ASKED), -1)
        return Restorable(sorted(n for n in asked if _is_leased(store, n, sidecars)))
    every = [key for each in sidecars for key in each.keys.store_keys(each.keys.namespace.parts)]
    stored = stored_among(finder.which_stored(every), every, store)
    found = Restorable([*range(1, num_pages + 1)])
    for sidecar in sidecars:
        lengths = sidecar.lengths(num_pages, stored)
        if lengths:
            found.by_pool[sidecar.name] = lengths[-1]
        found.lengths = sorted({*found.lengths}.intersection(lengths))
        if not found.lengths:  # SGLang's own backends ask no other pool either
            break
    found.lengths = _without_lost(store, found.lengths, sidecars)
    return found


def _without_lost(store: Store, lengths: list[int], sidecars: Sequence[Sidecar]) -> list[int]:
    """Returns the lengths up to the last one that can still be leased."""
    for length in itertools.islice(reversed(lengths), _MAX_ASKED):
        if _is_leased(store, length, sidecars):
            return [each for each in lengths if each <= length]
    return []


def _is_leased(store: Store, num_pages: int, sidecars: Iterable[Sidecar]) -> bool:
    wanted = [key for sidecar in sidecars for key in sidecar.wanted(num_pages)]
    return count_of(store.match(wanted), wanted, store) == len(wanted)
