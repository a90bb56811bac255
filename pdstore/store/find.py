"""find_optional: an optional protocol of a store, also through the wrappers around it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar, cast

from pdstore.store.base import Store
from pdstore.store.wrappers import CallWrapper, WrapperStore

P = TypeVar("P")

_VERBS: Mapping[str, str] = {
    "which_stored": "match",
    "get_right": "get",
    "borrow": "get",
    "take": "get",
    "put_sealed": "put",
    "put_at_once": "put",
    "reserve": "put",
    "publish": "put",
    "fill": "put",
}
"""Calls that a `CallWrapper` is around, and the verb of `Store` that each is a form of.

All other calls of optional protocols ask the store for no value, or give something back: there is
nothing to guard or to measure.
"""


def find_optional(store: Store, protocol: type[P]) -> P | None:
    """Returns an object with the protocol's calls on this store; None if the store has none.

    For a plain store it is the store itself. For a `CallWrapper` its calls go through the wrapper.
    Other wrappers offer what they let through (`WrapperStore.passes`).
    """
    if isinstance(store, WrapperStore) and protocol in store.passes:
        return find_optional(store.wrapped, protocol)
    if not isinstance(store, CallWrapper):
        return store if isinstance(store, protocol) else None
    inner = find_optional(store.wrapped, protocol)
    return None if inner is None else cast(P, _Through(store, inner))


class _Through:
    """The optional calls of a store, with a wrapper around those in `_VERBS`."""

    def __init__(self, wrapper: CallWrapper, inner: object) -> None:
        self._wrapper = wrapper
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        verb = _VERBS.get(name)
        return found if verb is None else partial(self._wrapper.around, verb, found)
