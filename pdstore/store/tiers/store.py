"""TieredStore: several stores as one pool; values are found in any of them, the fastest first."""

# Decision: docs/decisions/047-meeting-tier.md, docs/decisions/048-write-behind.md
from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, takewhile
from typing import cast

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey, prefix_of
from pdstore.native.library import address_of, load_library
from pdstore.settings import Settings
from pdstore.store.base import (
    Lifecycle,
    P,
    Slots,
    Store,
    count_of,
    log_once,
    num_done_of,
)
from pdstore.store.connect import check_url, open_store, place_of
from pdstore.store.tiers.copies import NumRight
from pdstore.store.tiers.found import is_for_all_tiers
from pdstore.store.tiers.lower import REMOVE_S, Limits, LowerTier
from pdstore.store.tiers.offers import Stack, optional_of
from pdstore.store.tiers.places import check_places, place_doubts, without_limits
from pdstore.store.tiers.purges import LATE_S, Purge, PurgeNumbers, error_of, namespaces_of
from pdstore.store.url import Place, StoreURL
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_COPY_TIMEOUT_S = 10.0  # for which `clear` waits until copies under way have ended
_SLOW_TIMEOUT_S = 2.0  # for which `clear` waits for a tier that is only slow
_CLOSE_S = 0.5  # for the copies that are under way
_CLOSE_LOWER_S = 0.3


def num_whole(values: Sequence[memoryview]) -> int:
    """Returns how many leading values have right headers and checksums."""
    return _num_leading(block.read_header(value) is not None for value in values)


def _check_of_copies(settings: Settings) -> NumRight:
    """Returns a function that verifies values before they are copied down, as `num_whole` does.

    The native library computes the checksums of a batch in one call, while other threads run. In
    Python, a copier at its default rate would hold up the engine: decode steps took 9.3 ms where
    they take 7.7.
    """
    library = load_library(settings, for_gpu=False)
    if settings.seal_key_file is not None:
        return len  # sealed values are verified at a load
    if library is None:
        return num_whole

    def num_right(values: Sequence[memoryview]) -> int:
        values = values[: _num_leading(len(value) >= block.HEADER_BYTES for value in values)]
        checksums = library.sum_values([address_of(v) for v in values], [len(v) for v in values])
        pairs = zip(values, checksums, strict=True)
        return _num_leading(block.read_header(*pair) is not None for pair in pairs)

    return num_right


def _num_leading(flags: Iterable[bool]) -> int:
    """Returns how many leading flags are True."""
    return sum(1 for _ in takewhile(bool, flags))


class TieredStore(Store):
    """`shm://pool file:///nvme/pool?copy=500MB/s&look=100ms`: URLs of tiers, the fastest first.

    P and D meet in the first tier: all values are put there, and tails, markers, beats and the
    pool's id are nowhere else. A put returns when the first tier has the values; their blocks are
    copied to each lower tier later (`Copier`). Values that a load has found below are put into the
    first tier when the load has verified them (`Promotion`). If the first tier fails, the call
    fails; a lower tier that fails has nothing (`LowerTier`).

    Each process queues copies of its own puts. `close` drops the queue. `remove` and `clear` reach
    every tier, wait for copies of this process that are under way, and drop what waits. A copier of
    another process removes below what is gone from the first tier when its copy ends. `clear` takes
    a purge number in every tier (`Purge`), by which other processes and other hosts notice it.

    first, lower: the first tier's store, and the lower tiers. tiers: the stores of all of them.
    num_right: verifies values before they are copied down; returns how many leading ones are right.
      A value that is wrong stays where it is.
    late_s: how long `clear` waits for copies of other processes.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        limits: Sequence[Limits] | None = None,
        *,
        num_right: NumRight = num_whole,
        late_s: float = LATE_S,
    ) -> None:
        first, *others = stores
        self.label = " ".join(store.label for store in stores)
        self.first = first
        of_lower = limits or [Limits()] * len(others)
        self.lower = [
            LowerTier(store, first, each, num_right)
            for store, each in zip(others, of_lower, strict=True)
        ]
        self.tiers = [first, *(tier.store for tier in self.lower)]
        self._stack = stack = Stack.over(first, self.lower, self._before_put, self.copy_down)
        self._found, self._search = stack.found, stack.search
        self._reader, self._promotion = stack.reader, stack.promotion
        self._numbers = PurgeNumbers(first)
        self._late_s = late_s
        self._lifecycle = Lifecycle(self.label)

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> TieredStore:
        check_places(url, settings)
        first, *others = url.tiers
        limits = [Limits.of(each) for each in others]
        urls = [first.text, *(each.inner("") for each in others)]
        with contextlib.ExitStack() as undo:
            stores = []
            for text in urls:
                stores.append(open_store(text, settings))
                undo.callback(stores[-1].close)
            undo.pop_all()
        limit = ", ".join(
            f"{each.label} (copy up to {of.copy_bytes_per_s / 1e6:g} MB/s)"
            for each, of in zip(others, limits, strict=True)
        )
        log_once(log, f"P and D meet in {first.label}; blocks are copied down to {limit}")
        for doubt in place_doubts(url, settings):
            log_once(log, f"{doubt.said}: {doubt.remedy}", logging.WARNING)
        return cls(stores, limits, num_right=_check_of_copies(settings))

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        check_places(url, settings)
        check_url(url.tiers[0].text, settings)
        for each in url.tiers[1:]:
            Limits.of(each)
            check_url(each.inner(""), settings)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        """Returns the place of the first tier, which decides whether P and D meet."""
        first, *others = url.tiers
        found = place_of(first.text, settings)
        below = tuple(place_of(without_limits(each), settings) for each in others)
        trial = found.trial_url
        if trial is not None:
            trial = " ".join([trial, *(each.text for each in others)])
        return found._replace(
            trial_url=trial,
            locks_memory=any(each.locks_memory for each in (found, *below)),
            below=below,
        )

    @property
    def lease_s(self) -> float:
        return min(store.lease_s for store in self.tiers)

    @property
    def expires_blocks(self) -> bool:
        return any(store.expires_blocks for store in self.tiers)

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.enter(keys)
        return self._search.match(0, keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        num_read, error = self._reader.read(0, keys, slots)
        if error is not None:
            error.num_done = num_read
            raise error
        return num_read

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        self._before_put(keys)
        num_taken = 0
        try:
            num_taken = count_of(self.first.put(keys, slots), keys, self.first)
        except StoreError as error:
            num_taken = num_done_of(error, keys)
            raise
        finally:
            self.copy_down(keys[:num_taken], slots.sizes[:num_taken])
        return num_taken

    def copy_down(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Queues copies of what the first tier has taken in one put, but only of blocks.

        sizes: the length of each value.
        """
        self._found.note(0, keys)
        goes = list(map(is_for_all_tiers, keys))
        if any(goes):
            for tier in self.lower:
                tier.copier.add(list(compress(keys, goes)), list(compress(sizes, goes)))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.enter(keys)
        if not any(map(is_for_all_tiers, keys)):
            self.first.remove(keys)
            return
        failed = self._in_all_tiers(
            lambda store: store.remove(keys), set(keys).__contains__, Deadline(REMOVE_S)
        )
        for error in failed:  # the tier is out; a load that reads the value there removes it then
            log.warning("not removed from a lower tier: %s", error)

    def clear(self, namespace: str) -> None:
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        for tier in self.lower:
            tier.find_out(_SLOW_TIMEOUT_S)
            # else the purge of a new tier would go unnoticed elsewhere
            tier.purges.adopt([namespace])
        numbers = [tier.purges.lower for tier in self.lower if not tier.is_out]
        purge = Purge(namespace, self._numbers, numbers)
        failed = purge.begin()
        time.sleep(self._late_s)
        cleared: list[Store | LowerTier] = []

        def clear(store: Store | LowerTier) -> None:
            store.clear(namespace)
            cleared.append(store)

        failed += self._in_all_tiers(
            clear,
            lambda key: key.startswith(prefix),
            Deadline(_COPY_TIMEOUT_S),
            slow_timeout_s=_SLOW_TIMEOUT_S,
        )
        failed += purge.end([tier.purges.lower for tier in self.lower if tier in cleared])
        if failed:
            silent = "; ".join(map(str, failed))
            raise StoreError(
                f"all other tiers are cleared, but not this one: {silent}",
                remedy="purge again when it answers",
            )

    def _before_put(self, keys: Sequence[BlockKey]) -> None:
        namespaces = namespaces_of(filter(is_for_all_tiers, keys))
        for tier in self.lower:
            tier.purges.adopt(namespaces)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until every queued copy is made, given up or lost; False after `timeout_s`."""
        deadline = Deadline(timeout_s)
        return all(tier.copier.flush(deadline.remaining_s()) for tier in self.lower)

    def allocate(self, num_bytes: int) -> memoryview:
        return self.first.allocate(num_bytes)

    def why_too_long(self, num_bytes: int) -> str | None:
        return self.first.why_too_long(num_bytes)

    def codes(self) -> Mapping[str, int]:
        """Returns the codes of all tiers."""
        total: Counter[str] = Counter()
        for store in self.tiers:
            total.update(store.codes())
        return total

    def optional(self, protocol: type[P]) -> P | None:
        return cast("P | None", optional_of(self._stack, protocol))

    def close(self) -> None:
        if not self._lifecycle.end():
            return
        deadline = Deadline(_CLOSE_S)
        for tier in self.lower:
            tier.copier.close(deadline.remaining_s())
        self.first.close()
        deadline = Deadline(_CLOSE_LOWER_S)
        for tier in self.lower:
            tier.close(deadline.remaining_s())

    def _in_all_tiers(
        self,
        call: Callable[[Store | LowerTier], None],
        is_dropped: Callable[[BlockKey], bool],
        deadline: Deadline,
        *,
        slow_timeout_s: float = 0.0,
    ) -> list[StoreError]:
        """Makes a call of every tier while no value is copied; returns errors of lower tiers.

        is_dropped: returns True for a key whose queued copy must not be made, and that the call
          forgets.
        deadline: until which it waits for copies and promotions under way.
        slow_timeout_s: how long it waits for a lower tier that is out because a call is slow.
        Raises the first tier's error, after the other calls.
        """
        for tier in self.lower:  # else a tier that hangs would be waited for below
            tier.find_out(slow_timeout_s)
        with contextlib.ExitStack() as stopped:
            stopped.enter_context(self._promotion.stopped(deadline.remaining_s()))
            for tier in self.lower:
                timeout_s = 0.0 if tier.is_out else deadline.remaining_s()
                stopped.enter_context(tier.copier.stopped(is_dropped, timeout_s))
            of_first = error_of(partial(call, self.first))
            errors = [error_of(partial(call, tier)) for tier in self.lower]
            self._found.forget(is_dropped)
        if of_first is not None:
            raise of_first
        return [error for error in errors if error is not None]
