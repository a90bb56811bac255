"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.in_place import InPlace, Loan, Places, Reservation
from pdstore.store.optional import (
    ChecksumReader,
    ChecksumWriter,
    ErrorCodes,
    FindsKeys,
    TellsChanges,
)
from pdstore.store.registry import open_store
from pdstore.store.url import StoreURL

__all__ = [
    "ChecksumReader",
    "ChecksumWriter",
    "ErrorCodes",
    "FindsKeys",
    "InPlace",
    "Lifecycle",
    "Loan",
    "Places",
    "Reservation",
    "Slots",
    "Store",
    "StoreURL",
    "TellsChanges",
    "check_call",
    "open_store",
]
