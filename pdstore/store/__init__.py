"""Where KV blocks live: the Store contract, and what a store's author needs."""

from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.registry import open_store
from pdstore.store.url import StoreURL

__all__ = ["Lifecycle", "Slots", "Store", "StoreURL", "check_call", "open_store"]
