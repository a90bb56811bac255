"""PoolIdentity: the id of a store's pool, by which P and D notice that they use different ones."""

from __future__ import annotations

from pdstore.errors import StoreError
from pdstore.store.base import Store
from pdstore.store.connect import read_pool_id
from pdstore.threads import Deadline, call_or


class PoolIdentity:
    """Keeps the id of the pool behind a store, and asks for it again every `age_s` seconds.

    A store that came back empty is another pool, and may come back more than once. Others notice
    that later, and may have ids in between that were never seen here. So for twice that time after
    a change no instance counts as one on another pool.
    One thread refreshes; any thread may read `current`.
    """

    def __init__(self, store: Store, age_s: float = 10.0) -> None:
        self._store, self._age_s = store, age_s
        self.current: bytes | None = None
        self._change_deadline = Deadline(0.0)
        self._deadline = Deadline(0.0)

    @property
    def remaining_s(self) -> float:
        """Seconds until `refresh` asks the store again."""
        return self._deadline.remaining_s()

    def refresh(self) -> None:
        """Asks the store when it is time to; whatever it raises leaves things as they are."""
        if self._deadline.is_over():
            self._ask()

    def may_be(self, pool_id: str | None) -> bool:
        """True if an instance with this `pool_id` uses this pool, or may do so.

        Does not ask the store. Any thread may call it.
        """
        current = self.current
        if pool_id is None or current is None or not self._change_deadline.is_over():
            return True
        return pool_id == current.hex()

    def is_same(self, pool_id: str | None) -> bool:
        """Does as `may_be`, but asks the store first where that says no.

        A store that tells no id is no reason to say no.
        """
        if self.may_be(pool_id):
            return True
        is_known = self._ask()
        return self.may_be(pool_id) if is_known else True

    def _ask(self) -> bool:
        """Asks the store. Returns False, and leaves things as they are, if it tells no id."""
        self._deadline = Deadline(self._age_s)
        pool_id = call_or(self._read, None)
        if pool_id is None:
            return False
        if pool_id != self.current:
            self._change_deadline = Deadline(0.0 if self.current is None else 2 * self._age_s)
            self.current = pool_id
        return True

    def _read(self) -> bytes | None:
        try:
            return read_pool_id(self._store)
        except StoreError:  # the calls that need the store report it
            return None
