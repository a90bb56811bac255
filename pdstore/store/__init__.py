"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.in_place import InPlace, Loan, Places, Reservation
from pdstore.store.optional import (
    ChecksumReader,
    ErrorCodes,
    FindsKeys,
    LimitsValues,
    ListsValues,
    NamesChanges,
    PutsAtOnce,
    Room,
    SealingWriter,
    StoredValue,
    TellsAbsence,
    TellsChanges,
    TellsRoom,
    VerifyingReader,
)
from pdstore.store.registry import open_store
from pdstore.store.url import StoreURL

__all__ = [
    "ChecksumReader",
    "ErrorCodes",
    "FindsKeys",
    "InPlace",
    "Lifecycle",
    "LimitsValues",
    "ListsValues",
    "Loan",
    "NamesChanges",
    "Places",
    "PutsAtOnce",
    "Reservation",
    "Room",
    "SealingWriter",
    "Slots",
    "Store",
    "StoreURL",
    "StoredValue",
    "TellsAbsence",
    "TellsChanges",
    "TellsRoom",
    "VerifyingReader",
    "check_call",
    "open_store",
]
