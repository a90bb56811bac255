"""ChangeListener: hears from a store that something was stored, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.optional import TellsChanges
from pdstore.threads import Ticker

News: TypeAlias = Sequence[BlockKey] | None
"""Keys that were stored; None: any may be."""

_WAIT_S = 0.1  # how long `close` may have to wait
_SETTLE_S = 0.0005  # changes within it are told together


class ChangeListener:
    """Calls `on_change` soon after each change of the store, as long as somebody listens.

    on_change: takes None. It is called once after every start too, for what changed before.
    """

    def __init__(
        self, store: TellsChanges, on_change: Callable[[News], None], *, retry_s: float = 1.0
    ) -> None:
        self._store, self._on_change, self._retry_s = store, on_change, retry_s
        self._is_listening = False
        self._seen: int | None = None
        self._thread = Ticker("pdstore-changes", self._turn)

    def listen(self) -> None:
        """Starts to listen. Once started, it may be called again."""
        if not self._is_listening:
            self._is_listening = True
            self._thread.wake()

    def rest(self) -> None:
        """Stops to listen."""
        self._is_listening = False

    def close(self, timeout_s: float = 1.0) -> None:
        self._is_listening = False
        self._thread.stop(timeout_s)

    def _turn(self) -> float | None:
        if not self._is_listening:
            self._seen = None
            return None
        try:
            now = self._store.wait_for_change(self._seen, _WAIT_S)
        except StoreError:  # the calls that need the store report it
            return self._retry_s
        seen, self._seen = self._seen, now
        if now == seen:
            return 0.0
        self._on_change(None)
        return _SETTLE_S
