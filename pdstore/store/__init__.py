"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.format.keys import BlockKey
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.optional import (
    ErrorCodes,
    FindsKeys,
    LimitsValues,
    ListsValues,
    Room,
    SealingWriter,
    StoredValue,
    TellsChanges,
    TellsRoom,
    VerifyingReader,
)
from pdstore.store.registry import open_store
from pdstore.store.url import StoreURL

__all__ = [
    "BlockKey",
    "ErrorCodes",
    "FindsKeys",
    "Lifecycle",
    "LimitsValues",
    "ListsValues",
    "Room",
    "SealingWriter",
    "Slots",
    "Store",
    "StoreURL",
    "StoredValue",
    "TellsChanges",
    "TellsRoom",
    "VerifyingReader",
    "check_call",
    "open_store",
]
