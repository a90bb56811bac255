"""TieredStore: several stores as one pool; values are found in any of them, the fastest first."""

# Decision: docs/decisions/047-meeting-tier.md, docs/decisions/048-write-behind.md
from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import cast

from pdstore.errors import ConfigError, StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey, prefix_of
from pdstore.settings import Settings
from pdstore.store.admission import Admission
from pdstore.store.base import (
    Lifecycle,
    P,
    Slots,
    Store,
    count_of,
    log_once,
    num_done_of,
    stored_among,
)
from pdstore.store.connect import check_url, open_store, place_of
from pdstore.store.optional import FindsKeys
from pdstore.store.tiers.found import Whereabouts
from pdstore.store.tiers.lower import REMOVE_S, Limits, LowerTier
from pdstore.store.tiers.offers import Stack, is_for_all_tiers, optional_of
from pdstore.store.tiers.promotion import Promotion
from pdstore.store.tiers.reader import TierReader
from pdstore.store.url import Place, Reach, StoreURL
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_COPY_TIMEOUT_S = 10.0  # for which `clear` waits until copies under way have ended
_PATIENCE_S = 2.0  # for which `clear` waits for a tier that is only slow
_MOST_READ = 1 << 15  # keys, of running loads: each asks after a copy where its values were read
_CLOSE_S = 0.5  # for the copies that are under way
_CLOSE_LOWER_S = 0.3
_REACHES = (Reach.PROCESS, Reach.HOST, Reach.SHARED)


def is_whole(value: memoryview) -> bool:
    """True if a value's header and its checksum are right."""
    return block.read_header(value) is not None


class TieredStore(Store):
    """`shm://pool file:///nvme/pool?copy=500MB/s&look=100ms`: URLs of tiers, the fastest first.

    P and D meet in the first tier: all values are put there, and tails, markers, beats and the
    pool's id are nowhere else. A put returns when the first tier has the values; their blocks are
    copied to each lower tier later (`Copier`). Values that a load has found below are put into the
    first tier when the load has verified them (`Promotion`). If the first tier fails, the call
    fails; a lower tier that fails has nothing (`LowerTier`).

    Each process queues copies of its own puts. `close` drops the queue. `remove` and `clear` reach
    every tier, wait for copies of this process that are under way, and drop what waits. A copier of
    another process removes below what is gone from the first tier when its copy ends; so only one
    that is killed before, or has another first tier, may bring a cleared value back.

    first, lower: the first tier's store, and the lower tiers. tiers: the stores of all of them.
    is_right: verifies a value before it is copied down; a value that is wrong stays where it is.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        limits: Sequence[Limits] | None = None,
        *,
        is_right: Callable[[memoryview], bool] = is_whole,
    ) -> None:
        first, *others = stores
        self.label = " ".join(store.label for store in stores)
        self.first = first
        of_lower = limits or [Limits()] * len(others)
        self.lower = [
            LowerTier(store, first, each, is_right)
            for store, each in zip(others, of_lower, strict=True)
        ]
        self.tiers = [first, *(tier.store for tier in self.lower)]
        self._finders = [store.optional(FindsKeys) for store in self.tiers]
        self._found = Whereabouts()
        self._read = Whereabouts(_MOST_READ)
        self._promotion = Promotion(first, self._found)
        self._reader = TierReader(first, self.lower, self._found, self._read, self._have)
        self._stack = Stack(
            self.tiers,
            self._found,
            self._read,
            self.which_in,
            self._reader.read_in,
            self._reader.remove_in,
            lambda number, sizes: self.lower[number - 1].oldest_age_s(sizes),
            self.use_admission,
            self._promotion.promote,
            self._match_in,
            self.copy_down,
            problems=lambda: [tier.problem for tier in self.lower],
        )
        self._lifecycle = Lifecycle(self.label)

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> TieredStore:
        _check_tiers(url, settings)
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
        if settings.seal_key_file is None:
            return cls(stores, limits)
        return cls(stores, limits, is_right=lambda _: True)  # sealed values are verified at a load

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        _check_tiers(url, settings)
        check_url(url.tiers[0].text, settings)
        for each in url.tiers[1:]:
            Limits.of(each)
            check_url(each.inner(""), settings)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        """Returns the place of the first tier, which decides whether P and D meet."""
        first, *others = url.tiers
        found = place_of(first.text, settings)
        below = tuple(place_of(_without_limits(each), settings) for each in others)
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
        return self._match(0, keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
        num_read, error = self._reader.read(0, keys, slots)
        if error is not None:
            error.num_done = num_read
            raise error
        return num_read

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.enter(keys, slots)
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
        """Queues the copies of one put to the first tier, of those of its values that are blocks.

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
        failed = self._in_all_tiers(
            lambda store: store.clear(namespace),
            lambda key: key.startswith(prefix),
            Deadline(_COPY_TIMEOUT_S),
            patience_s=_PATIENCE_S,
        )
        if failed:
            raise StoreError(f"the tiers above are cleared, but not this one: {failed[0]}")

    def use_admission(self, admission: Admission) -> None:
        """Lets an admission decide what is copied down and what is promoted."""
        self._promotion.admission = admission
        for tier in self.lower:
            tier.copier.admission = admission

    def which_in(self, number: int, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Returns which keys the tier of a number has; none, if it cannot tell or is out."""
        finder = self._finders[number]
        none: set[BlockKey] = set()
        if finder is None:
            return [False] * len(keys)

        def search() -> set[BlockKey]:
            return stored_among(finder.which_stored(keys), keys, self.tiers[number])

        stored = self.lower[number - 1].look(search, none) if number else search()
        return [key in stored for key in keys]

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until every queued copy is made, given up or lost; False after `timeout_s`."""
        deadline = Deadline(timeout_s)
        return all(tier.copier.flush(deadline.remaining_s()) for tier in self.lower)

    def allocate(self, num_bytes: int) -> memoryview:
        return self.first.allocate(num_bytes)

    def why_too_long(self, num_bytes: int) -> str | None:
        return self.first.why_too_long(num_bytes)

    def codes(self) -> Mapping[str, int]:
        """Returns the codes of all tiers, each lower tier's copies by outcome, and wrong values."""
        total: Counter[str] = Counter()
        for store in self.tiers:
            total.update(store.codes())
        for number, tier in enumerate(self.lower, start=1):
            for outcome, count in tier.copier.counts.items():
                total[f"tier{number}_{outcome}"] += count
            total[f"tier{number}_promoted"] += self._promotion.counts[number]
        for number, count in self._reader.num_wrong.items():
            total[f"tier{number}_wrong"] += count
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

    def _match(self, number: int, keys: Sequence[BlockKey]) -> int:
        """Matches leading keys in the tier of a number and in those below it.

        One search finds the leading keys that this tier has. Of the others, a second search finds
        which it has, and the next tier is asked for the rest, all in one call.
        """
        found = self._match_in(number, keys)
        if found == len(keys) or number == len(self.lower) or not is_for_all_tiers(keys[found]):
            return found
        rest = keys[found:]
        has = self._have(number, rest)
        below = [i for i, is_here in enumerate(has) if not is_here]
        num_below = self._match(number + 1, [rest[i] for i in below])
        end = below[num_below] if num_below < len(below) else len(has)
        here = [i for i in range(end) if has[i]]
        leased = self._match_in(number, [rest[i] for i in here]) if here else 0
        return found + (here[leased] if leased < len(here) else end)

    def _have(self, number: int, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns which keys a tier has, up to the first that it lacks and that no other may have.

        The tiers below may keep tails of the time when one of them was a pool by itself.
        """
        has = [*self.which_in(number, keys)]
        ends = (i for i, key in enumerate(keys) if not (has[i] or is_for_all_tiers(key)))
        return has[: next(ends, len(keys))]

    def _match_in(self, number: int, keys: Sequence[BlockKey]) -> int:
        store = self.tiers[number]

        def match() -> int:
            return count_of(store.match(keys), keys, store)

        found = self.lower[number - 1].look(match, 0) if number else match()
        self._found.note(number, keys[:found])
        return found

    def _in_all_tiers(
        self,
        call: Callable[[Store | LowerTier], None],
        is_dropped: Callable[[BlockKey], bool],
        deadline: Deadline,
        *,
        patience_s: float = 0.0,
    ) -> list[StoreError]:
        """Makes a call of every tier while no value is copied; returns errors of lower tiers.

        is_dropped: returns True for a key whose queued copy must not be made, and that the call
          forgets.
        deadline: until which it waits for copies and promotions under way.
        patience_s: how long it waits for a lower tier that is out because a call takes too long.
        Raises the first tier's error, after the other calls.
        """
        for tier in self.lower:  # else a tier that hangs would be waited for below
            tier.find_out(patience_s)
        with contextlib.ExitStack() as stopped:
            stopped.enter_context(self._promotion.stopped(deadline.remaining_s()))
            for tier in self.lower:
                timeout_s = 0.0 if tier.is_out else deadline.remaining_s()
                stopped.enter_context(tier.copier.stopped(is_dropped, timeout_s))
            of_first = _error_of(partial(call, self.first))
            errors = [_error_of(partial(call, tier)) for tier in self.lower]
            self._found.forget(is_dropped)
        if of_first is not None:
            raise of_first
        return [error for error in errors if error is not None]


def _error_of(call: Callable[[], None]) -> StoreError | None:
    try:
        call()
    except StoreError as error:
        return error
    return None


def _without_limits(url: StoreURL) -> str:
    """Returns the URL of a lower tier as its store knows it. Raises ConfigError."""
    url = StoreURL.of(url.text)
    Limits.of(url)
    return url.inner("")


def _check_tiers(url: StoreURL, settings: Settings) -> None:
    """Raises ConfigError for a lower tier that instances with the same first one may not share.

    Also raises it for a place that two of the tiers name.
    """
    first, *others = url.tiers
    places = [place_of(first.text, settings)]
    for each in others:
        place = place_of(_without_limits(each), settings)
        if _REACHES.index(place.reach) < _REACHES.index(places[0].reach):
            raise ConfigError(
                f"{each.label} is for {place.reach.value}, and the first tier, {first.label}, for"
                f" {places[0].reach.value}: a lower tier must be there for all instances of the"
                " pool; write the tier of fewer instances first"
            )
        if place.path is not None and place.path in [above.path for above in places]:
            raise ConfigError(f"{each.label} is the place of two tiers: {place.path}; name it once")
        places.append(place)
