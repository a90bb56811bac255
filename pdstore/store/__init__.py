"""open_store: from a URL to a store."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from pdstore.errors import MissingExtra
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.url import StoreURL

__all__ = ["Store", "StoreURL", "open_store"]


class _Entry(NamedTuple):
    module: str
    name: str
    extra: str | None  # what `pip install pdstore[...]` brings its library


_STORES = {
    "memory": _Entry("pdstore.store.memory", "MemoryStore", None),
    "file": _Entry("pdstore.store.file.store", "FileStore", None),
    "redis": _Entry("pdstore.store.redis", "RedisStore", "redis"),
    "rediss": _Entry("pdstore.store.redis", "RedisStore", "redis"),
    "redis+unix": _Entry("pdstore.store.redis", "RedisStore", "redis"),
    "mooncake": _Entry("pdstore.store.mooncake.store", "MooncakeStore", "mooncake"),
}


def open_store(url: str, settings: Settings) -> Store:
    """The store at a URL, not connected yet. Raises ConfigError, MissingExtra with the command."""
    parsed = StoreURL.of(url)
    entry = _STORES[parsed.scheme]
    try:
        module = importlib.import_module(entry.module)
    except ImportError as error:
        if entry.extra is None:
            raise
        raise MissingExtra(
            f"{parsed.scheme}:// needs a package that is not installed ({error.name}): "
            f"pip install 'pdstore[{entry.extra}]'"
        ) from error
    store: Store = getattr(module, entry.name).open(parsed, settings)
    return store
