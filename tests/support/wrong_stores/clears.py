"""Stores that are wrong about a namespace: they clear too much, too little, or at a wrong time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey, Kind, kind_of, prefix_of
from pdstore.store.base import Slots
from tests.support.wrong_stores.base import WrongStore

_FORGETS = (
    "test_clear_forgets_blocks_tails_and_markers_leased_or_not",
    "test_a_namespace_may_be_empty_and_its_keys_take_new_bytes",
    "test_clear_beside_writers_and_readers_harms_nobody",
)


class ClearsSome(WrongStore):
    """Clears the keys for which `_is_meant` says so."""

    def clear(self, namespace: str) -> None:
        prefix_of(namespace)
        self.remove([key for key in list(self._shelf.values) if self._is_meant(key, namespace)])

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return key.startswith(prefix_of(namespace))


class ClearsNothing(ClearsSome):
    caught_by = (*_FORGETS, "test_clear_forgets_3000_values")

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return False


class ClearsEverything(ClearsSome):
    caught_by = ("test_clear_leaves_all_other_keys",)

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return True


class ClearsThePoolsIdToo(ClearsSome):
    caught_by = ("test_clear_leaves_all_other_keys",)

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return super()._is_meant(key, namespace) or kind_of(key) is Kind.POOL


class ClearsNeighbours(ClearsSome):
    caught_by = ("test_clear_leaves_all_other_keys",)

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return key.startswith(f"pds1:{namespace[:-1]}")


class ClearsWhereverItIsNamed(ClearsSome):
    caught_by = ("test_clear_leaves_all_other_keys",)

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return namespace in key


class ClearsNoTails(ClearsSome):
    caught_by = _FORGETS

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return super()._is_meant(key, namespace) and kind_of(key) is not Kind.TAIL


class ClearsNoMarkers(ClearsSome):
    caught_by = _FORGETS

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return super()._is_meant(key, namespace) and kind_of(key) is not Kind.HANDOFF


class ClearsOneShard(ClearsSome):
    caught_by = _FORGETS

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        return super()._is_meant(key, namespace) and ":7:" not in key


class ClearsNothingLeased(ClearsSome):
    caught_by = ("test_clear_forgets_blocks_tails_and_markers_leased_or_not",)

    def _is_meant(self, key: BlockKey, namespace: str) -> bool:
        now = time.monotonic() + 2  # beyond the moment for which a put alone keeps a value
        return super()._is_meant(key, namespace) and self._shelf.values[key].kept_until < now


class ClearsOnePage(ClearsSome):
    caught_by = ("test_clear_forgets_3000_values",)

    def clear(self, namespace: str) -> None:
        prefix = prefix_of(namespace)
        self.remove([key for key in list(self._shelf.values) if key.startswith(prefix)][:1024])


class ClearsByAnyPrefix(WrongStore):
    caught_by = ("test_what_is_no_namespace_is_refused",)

    def clear(self, namespace: str) -> None:
        self._enter([]).drop_all(f"pds1:{namespace}")


class FailsToClearNothing(WrongStore):
    caught_by = ("test_a_namespace_may_be_empty_and_its_keys_take_new_bytes",)

    def clear(self, namespace: str) -> None:
        prefix = prefix_of(namespace)
        if not any(key.startswith(prefix) for key in list(self._shelf.values)):
            raise StoreError("nothing there")
        super().clear(namespace)


class ClearsLate(WrongStore):
    caught_by = _FORGETS[:1]

    def __init__(self) -> None:
        super().__init__()
        self._due: set[str] = set()

    def clear(self, namespace: str) -> None:
        for earlier in self._due:
            super().clear(earlier)
        self._due = {namespace}


class HidesWhatItCleared(WrongStore):
    caught_by = ("test_a_namespace_may_be_empty_and_its_keys_take_new_bytes",)

    def __init__(self) -> None:
        super().__init__()
        self._hidden: tuple[str, ...] = ()

    def clear(self, namespace: str) -> None:
        self._hidden += (prefix_of(namespace),)

    def match(self, keys: Sequence[BlockKey]) -> int:
        return super().match(self._shown(keys))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        shown = self._shown(keys)
        return super().get(shown, slots.part(0, len(shown)))

    def _shown(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return keys[: next((i for i, k in enumerate(keys) if k.startswith(self._hidden)), None)]


class ClearsAfterClose(WrongStore):
    caught_by = ("test_calls_after_close_raise_store_closed",)

    def clear(self, namespace: str) -> None:
        self._shelf.drop_all(prefix_of(namespace))


class LosesCountOfItsRoom(WrongStore):
    caught_by = ("test_clear_leaves_room",)

    def __init__(self) -> None:
        super().__init__(budget=24 * 64 << 10)

    def clear(self, namespace: str) -> None:
        prefix = prefix_of(namespace)
        for key in [key for key in self._shelf.values if key.startswith(prefix)]:
            del self._shelf.values[key]
