"""WaitIndex: the waits of an instance by the keys that they want, so that news finds its wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdstore.format.keys import BlockKey
from pdstore.scheduler.marker_wait import MarkerWait

_Waits = dict[MarkerWait, None]  # in the order in which they came


class WaitIndex:
    """A set of waits. A look costs what its keys cost the store; only its news touches waits.

    For one thread. Iterating goes over a copy.
    """

    def __init__(self) -> None:
        self._wants: dict[MarkerWait, list[BlockKey]] = {}
        self._by_key: dict[BlockKey, _Waits] = {}
        self._by_failed: dict[BlockKey, _Waits] = {}  # by the key of `failed`, which is rare

    def __len__(self) -> int:
        return len(self._wants)

    def __iter__(self) -> Iterator[MarkerWait]:
        return iter(list(self._wants))

    def add(self, wait: MarkerWait) -> None:
        """Takes a wait."""
        self._wants[wait] = wait.wanted(with_failed=False)
        for key in self._wants[wait]:
            self._by_key.setdefault(key, {})[wait] = None
        self._by_failed.setdefault(wait.failed, {})[wait] = None

    def renew(self, wait: MarkerWait) -> None:
        """Takes note that a wait may want other keys than before."""
        if self._wants.get(wait, []) != wait.wanted(with_failed=False):
            self.remove(wait)
            self.add(wait)

    def remove(self, wait: MarkerWait) -> None:
        """Forgets a wait, if it is known."""
        wanted = self._wants.pop(wait, None)
        if wanted is not None:
            for key in wanted:
                _forget(self._by_key, key, wait)
            _forget(self._by_failed, wait.failed, wait)

    def wanted(self, *, with_failed: bool) -> list[BlockKey]:
        """Returns the keys to look for, each once: two may wait for one hand-off."""
        return [*self._by_key, *self._by_failed] if with_failed else list(self._by_key)

    def about(self, news: Iterable[BlockKey]) -> list[MarkerWait]:
        """Returns the waits that want any of these keys."""
        found: _Waits = {}
        for key in news:
            found |= self._by_key.get(key, {})
            found |= self._by_failed.get(key, {})
        return list(found)


def _forget(by_key: dict[BlockKey, _Waits], key: BlockKey, wait: MarkerWait) -> None:
    waits = by_key.get(key, {})
    waits.pop(wait, None)
    if not waits:
        by_key.pop(key, None)
