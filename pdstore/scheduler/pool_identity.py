"""PoolIdentity: the id of a store's pool, by which P and D notice that they use different ones."""

from __future__ import annotations

import contextlib

from pdstore.errors import StoreError
from pdstore.store.base import Store
from pdstore.store.connect import read_pool_id
from pdstore.threads import Deadline


class PoolIdentity:
    """Keeps the id of the pool behind a store, and asks for it again every `age_s` seconds.

    A store that came back empty is another pool. The other instance may notice that later, so the
    former id still counts for twice that time.
    One thread refreshes; any thread may read `current`.
    """

    def __init__(self, store: Store, age_s: float = 10.0) -> None:
        self._store, self._age_s = store, age_s
        self.current: bytes | None = None
        self._former: bytes | None = None
        self._former_deadline = Deadline(0.0)
        self._deadline = Deadline(0.0)

    @property
    def remaining_s(self) -> float:
        """Seconds until `refresh` asks the store again."""
        return self._deadline.remaining_s()

    def refresh(self) -> None:
        """Asks the store when it is time to; a store that errs leaves things as they are."""
        if self._deadline.is_over():
            self._ask()

    def may_be(self, pool_id: str | None) -> bool:
        """True if an instance with this `pool_id` uses this pool, or if either id is unknown.

        Does not ask the store. Any thread may call it.
        """
        current = self.current
        if pool_id is None or current is None:
            return True
        former = None if self._former_deadline.is_over() else self._former
        return pool_id in (current.hex(), former.hex() if former else None)

    def is_same(self, pool_id: str | None) -> bool:
        """Does as `may_be`, but asks the store before it returns False."""
        if not self.may_be(pool_id):
            self._ask()
        return self.may_be(pool_id)

    def _ask(self) -> None:
        self._deadline = Deadline(self._age_s)
        with contextlib.suppress(StoreError):  # the calls that need the store report it
            pool_id = read_pool_id(self._store)
            if pool_id != self.current:
                self._former, self.current = self.current, pool_id
                self._former_deadline = Deadline(2 * self._age_s)
