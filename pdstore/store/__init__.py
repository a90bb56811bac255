"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.format.keys import BlockKey
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.connect import open_store
from pdstore.store.optional import (
    EvictsByUse,
    FindsKeys,
    ListsValues,
    Room,
    StoredValue,
    TellsChanges,
    TellsRemovals,
    TellsRoom,
)
from pdstore.store.url import StoreURL

__all__ = [
    "BlockKey",
    "EvictsByUse",
    "FindsKeys",
    "Lifecycle",
    "ListsValues",
    "Room",
    "Slots",
    "Store",
    "StoreURL",
    "StoredValue",
    "TellsChanges",
    "TellsRemovals",
    "TellsRoom",
    "check_call",
    "open_store",
]
