"""LowerTier: one of the tiers below the first, which the pool can do without."""

# Decision: docs/decisions/047-meeting-tier.md
from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pdstore.errors import BadValue, StoreClosed, StoreError, StoreTimeout, StoreUnavailable
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.metrics import Metrics, TierState
from pdstore.store.base import Slots, Store, count_of, num_done_of
from pdstore.store.guard import GuardedStore, problem_of
from pdstore.store.optional import EvictsByUse
from pdstore.store.tiers.copies import COPY_BYTES_PER_S, WAITING_BYTES, Copier, NumRight
from pdstore.store.tiers.hangs import ReadWatch
from pdstore.store.tiers.purges import PurgeWatch
from pdstore.store.url import StoreURL
from pdstore.threads import CallBeside

A = TypeVar("A")

LOOK_S = 0.1
REMOVE_S = 1.0


class Limits(NamedTuple):
    """Limits of one lower tier, for each process.

    copy_bytes_per_s: `copy` in the tier's URL: the most bytes copied to it in a second.
    look_s: `look` in the URL: the most seconds for which a caller waits while the tier is searched.
    waiting_bytes: the most bytes of values that wait to be copied.
    """

    copy_bytes_per_s: int = COPY_BYTES_PER_S
    look_s: float = LOOK_S
    waiting_bytes: int = WAITING_BYTES

    @classmethod
    def of(cls, url: StoreURL) -> Limits:
        """Takes the options of a lower tier out of its URL. Raises ConfigError."""
        return cls(url.rate("copy", COPY_BYTES_PER_S), url.seconds("look", LOOK_S, 60.0))


class LowerTier:
    """A tier below the first: with a breaker, a time limit for searches, and its copier.

    A search runs beside its caller, who waits for at most `Limits.look_s`. If the search takes
    longer, the tier counts as empty until this search has ended. So it is with a removal, for which
    the caller waits for `REMOVE_S`. If the search ends with an error,
    or if calls fail, the tier counts as empty until its breaker's probe has an answer. So a tier
    that hangs costs a process one wait for each outage, and no request waits for a probe. A `get`
    uses its caller's memory, so the caller waits for it; but if it takes too long (`ReadWatch`),
    the tier counts as empty for all other calls, until a read is answered.

    store: the tier's store, with its breaker.
    purges: tells whether a purge forbids copies between the first tier and this one.
    """

    def __init__(
        self,
        store: Store,
        first: Store,
        limits: Limits,
        num_right: NumRight,
    ) -> None:
        self.store = GuardedStore(store, Metrics())  # until `count_in` names others
        self._by_use = self.store.optional(EvictsByUse)
        self._look_s = limits.look_s
        self._change_s = max(limits.look_s, REMOVE_S)
        self._late: CallBeside[Any] | None = None
        self._reads = ReadWatch()
        self.purges = PurgeWatch(first, self.store, self.look)
        self.copier = Copier(
            first,
            self.store,
            purges=self.purges,
            is_out=lambda: self.is_out,
            num_right=num_right,
            bytes_per_s=limits.copy_bytes_per_s,
            waiting_bytes=limits.waiting_bytes,
        )

    @property
    def is_out(self) -> bool:
        """True while a call takes too long or the breaker is open: then the tier has nothing."""
        late = self._late
        is_late = late is not None and not late.has_ended()
        return self.store.is_open or is_late or self._reads.is_hung()

    @property
    def problem(self) -> str | None:
        """Text that says why the tier is out, or of what nothing is copied; None if all is well.

        Does I/O only while a purge forbids copies.
        """
        if not self.is_out:
            return self.purges.problem()
        why = (problem_of(self.store) if self.store.is_open else None) or "a call takes too long"
        return f"the tier {self.store.label} is left out until it answers: {why}"

    def state(self, name: str, copies: Mapping[str, int]) -> TierState:
        """Returns the tier's present state, under a name and with these counts."""
        waiting = self.copier.num_waiting_bytes
        return TierState(name, self.store.label, self.problem, waiting, copies)

    def look(self, search: Callable[[], A], otherwise: A) -> A:
        """Searches the tier; returns `otherwise` if it is out, fails, or takes too long."""
        try:
            return self.ask(search)
        except StoreError:
            return otherwise

    def ask(self, search: Callable[[], A]) -> A:
        """Searches the tier. Raises StoreError, also if the tier is out or takes too long."""
        return self._beside(search, self._look_s)

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        """Does what `EvictsByUse` says; None also if the tier cannot tell, is out, or is late."""
        by_use = self._by_use
        return self.look(partial(by_use.oldest_age_s, sizes), None) if by_use is not None else None

    def find_out(self, slow_timeout_s: float = 0.0) -> None:
        """Makes a search, so that the tier is out from then on if it hangs.

        slow_timeout_s: how long it waits first for the end of a call that takes too long.
        """
        if (late := self._late) is not None:
            late.has_ended(slow_timeout_s)
        with contextlib.suppress(StoreError):
            self._beside(lambda: self.store.match([POOL_ID_KEY]), self._change_s)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Removes values; the removal goes on beside the caller if it takes too long.

        Raises StoreError, also if the tier is out or takes too long.
        """
        self._beside(partial(self.store.remove, keys), self._change_s)

    def clear(self, namespace: str) -> None:
        """Clears a namespace, however long it takes. Raises StoreError, also if the tier is out."""
        self._raise_if_out()
        self.store.clear(namespace)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> tuple[int, BadValue | None]:
        """Reads leading values; returns how many, and the error if the next one is wrong."""
        if not keys or self.is_out:
            return 0, None
        probe = partial(self._probe, keys[-1], slots.sizes[len(keys) - 1])
        try:
            with self._reads.reading(sum(slots.sizes[: len(keys)]), probe):
                return count_of(self.store.get(keys, slots), keys, self.store), None
        except BadValue as error:
            return num_done_of(error, keys), error
        except StoreClosed:
            raise
        except StoreError as error:
            return num_done_of(error, keys), None

    def close(self, timeout_s: float) -> None:
        """Closes the store; that goes on beside the caller if it takes too long."""
        try:
            CallBeside("pdstore-tier-close", self.store.close).has_ended(timeout_s)
        except RuntimeError:  # no thread can start now, as at the interpreter's end
            self.store.close()

    def _probe(self, key: BlockKey, size: int) -> None:
        """Reads one value into memory of its own. Raises StoreError."""
        self.store.get([key], Slots(self.store.allocate(size), size, [0], [size]))

    def _beside(self, call: Callable[[], A], timeout_s: float) -> A:
        """Makes a call beside the caller. Raises StoreError; the tier is out if it takes longer."""
        self._raise_if_out()
        try:
            beside = CallBeside("pdstore-tier-call", call)
        except RuntimeError as error:
            raise StoreUnavailable(f"{self.store.label}: no thread can start now") from error
        if not beside.has_ended(timeout_s):
            self._late = beside
            raise StoreTimeout(f"{self.store.label}: no answer after {timeout_s:g} s")
        return beside.result()

    def _raise_if_out(self) -> None:
        if self.is_out:
            raise StoreUnavailable(self.problem or f"{self.store.label} is back only now")
