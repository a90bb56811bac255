"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.format.keys import BlockKey
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.connect import open_store
from pdstore.store.optional import (
    FindsKeys,
    ListsValues,
    Room,
    StoredValue,
    TellsChanges,
    TellsOldest,
    TellsRoom,
)
from pdstore.store.url import StoreURL

__all__ = [
    "BlockKey",
    "FindsKeys",
    "Lifecycle",
    "ListsValues",
    "Room",
    "Slots",
    "Store",
    "StoreURL",
    "StoredValue",
    "TellsChanges",
    "TellsOldest",
    "TellsRoom",
    "check_call",
    "open_store",
]
