"""Stores that wrap a store: WrapperStore, HookedStore, and StorePart, for composites of stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pdstore.format.keys import BlockKey
from pdstore.store.base import P, Slots, Store
from pdstore.store.optional import (
    FindsAgain,
    FindsKeys,
    MeetsInTier,
    OpensTiers,
    PeeksValues,
    RenewsUnread,
    TellsRemovals,
)
from pdstore.store.transfer import (
    CallHook,
    Moved,
    MovesValues,
    Transfer,
    TransferContext,
    moved_by,
)

A = TypeVar("A")


class WrapperStore(Store):
    """Passes every call of the contract to the wrapped store.

    It offers only those of the wrapped store's optional protocols that a subclass names in
    `passes`. One that changes values must name no protocol whose calls read or write values: then
    values pass through staging and through the wrapper's own `get` and `put`.
    """

    passes: tuple[type, ...] = ()
    """Optional protocols that a subclass passes on unchanged."""

    added_bytes: int = 0
    """Bytes that a subclass adds to each value, except to the pool's id."""

    def __init__(self, store: Store) -> None:
        self.wrapped = store
        self.label = store.label

    @property
    def lease_s(self) -> float:
        return self.wrapped.lease_s

    @property
    def expires_blocks(self) -> bool:
        return self.wrapped.expires_blocks

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.wrapped.match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.wrapped.get(keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.wrapped.put(keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.wrapped.remove(keys)

    def clear(self, namespace: str) -> None:
        self.wrapped.clear(namespace)

    def allocate(self, num_bytes: int) -> memoryview:
        return self.wrapped.allocate(num_bytes)

    def why_too_long(self, num_bytes: int) -> str | None:
        return self.wrapped.why_too_long(num_bytes + self.added_bytes)

    def codes(self) -> Mapping[str, int]:
        return self.wrapped.codes()

    def optional(self, protocol: type[P]) -> P | None:
        if protocol in self.passes:
            return self.wrapped.optional(protocol)
        return super().optional(protocol)

    def close(self) -> None:
        self.wrapped.close()


class HookedStore(WrapperStore):
    """Makes calls of the wrapped store through `around`, which a subclass overrides.

    It changes no answer, so it offers all optional protocols of the wrapped store. `around` sees
    each call that finds or moves values, also those of a `Transfer`, but no other optional calls.
    """

    def around(self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]) -> Moved[A]:
        """Makes a call, as a `CallHook` does. keys: empty for a `clear`."""
        return call()

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.around("match", keys, lambda: Moved(self.wrapped.match(keys))).answer

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("get", keys, lambda: moved_by(self.wrapped.get, keys, slots)).answer

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("put", keys, lambda: moved_by(self.wrapped.put, keys, slots)).answer

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.around("remove", keys, lambda: Moved(self.wrapped.remove(keys)))

    def clear(self, namespace: str) -> None:
        self.around("clear", (), lambda: Moved(self.wrapped.clear(namespace)))

    def optional(self, protocol: type[P]) -> P | None:
        found = self.wrapped.optional(protocol)
        hooked = _HOOKED.get(protocol)
        return found if found is None or hooked is None else cast(P, hooked(self.around, found))


class _HookedFinder:
    def __init__(self, hook: CallHook, inner: FindsKeys) -> None:
        self._hook = hook
        self._inner = inner

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._hook("match", keys, lambda: Moved(self._inner.which_stored(keys))).answer


class _HookedRemovals:
    def __init__(self, hook: CallHook, inner: TellsRemovals) -> None:
        self._hook = hook
        self._inner = inner

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._hook("match", keys, lambda: Moved(self._inner.which_removed(keys))).answer


class _HookedAgain:
    def __init__(self, hook: CallHook, inner: FindsAgain) -> None:
        self._hook = hook
        self._inner = inner

    @property
    def shortest_lease_s(self) -> float:
        return self._inner.shortest_lease_s

    def match_again(self, keys: Sequence[BlockKey]) -> int:
        return self._hook("match", keys, lambda: Moved(self._inner.match_again(keys))).answer

    def which_again(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._hook("match", keys, lambda: Moved(self._inner.which_again(keys))).answer


class _HookedRenewer:
    def __init__(self, hook: CallHook, inner: RenewsUnread) -> None:
        self._hook = hook
        self._inner = inner

    def renew(self, keys: Sequence[BlockKey], first: int, since: float) -> int:
        return self._hook(
            "match", keys, lambda: Moved(self._inner.renew(keys, first, since))
        ).answer


class _HookedPeeker:
    def __init__(self, hook: CallHook, inner: PeeksValues) -> None:
        self._hook = hook
        self._inner = inner

    def peek(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._hook("get", keys, lambda: moved_by(self._inner.peek, keys, slots)).answer


class _HookedMover:
    def __init__(self, hook: CallHook, inner: MovesValues) -> None:
        self._hook = hook
        self._inner = inner

    def transfer(self, context: TransferContext) -> Transfer | None:
        return self._inner.transfer(context.through(self._hook))


class _HookedMeeting:
    def __init__(self, hook: CallHook, inner: MeetsInTier) -> None:
        self._hook = hook
        self._inner = inner

    def meeting_store(self) -> Store:
        return StorePart(self._inner.meeting_store(), self._hook)


class _HookedTiers:
    def __init__(self, hook: CallHook, inner: OpensTiers) -> None:
        self._hook = hook
        self._inner = inner

    def tier_stores(self) -> Sequence[Store]:
        return [StorePart(store, self._hook) for store in self._inner.tier_stores()]


_HOOKED: Mapping[type, Callable[[CallHook, Any], object]] = {
    FindsAgain: _HookedAgain,
    FindsKeys: _HookedFinder,
    MeetsInTier: _HookedMeeting,
    OpensTiers: _HookedTiers,
    PeeksValues: _HookedPeeker,
    RenewsUnread: _HookedRenewer,
    TellsRemovals: _HookedRemovals,
    MovesValues: _HookedMover,
}
"""The optional protocols whose calls find or move values."""


class StorePart(HookedStore):
    """One of the stores that a composite consists of, with the hooks around the whole.

    hook: `TransferContext.call` of the composite.
    """

    def __init__(self, store: Store, hook: CallHook) -> None:
        super().__init__(store)
        self._hook = hook

    def around(self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]) -> Moved[A]:
        return self._hook(verb, keys, call)
