"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.in_place import InPlace, Loan, Places, Reservation
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
    "ErrorCodes",
    "FindsKeys",
    "InPlace",
    "Lifecycle",
    "LimitsValues",
    "ListsValues",
    "Loan",
    "Places",
    "Reservation",
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
