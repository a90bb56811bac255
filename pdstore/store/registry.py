"""open_store: from a URL to a store, pdstore's own or one of an installed package; its check.

An entry point of the group `pdstore.stores` names a class with `open(url, settings)`: it takes its
options from the StoreURL, refuses the others by `url.finish`, and returns a store that is not
connected yet. A `check(url, settings)` beside it raises ConfigError for what `open` would refuse;
it makes, connects and logs nothing. An engine calls it before it starts.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from operator import methodcaller

from pdstore.errors import ConfigError, MissingExtra
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.url import StoreURL, refuse_slips, without_secret

GROUP = "pdstore.stores"
"""The entry-point group in which a package names its stores: `scheme = "module:Class"`."""

_REDIS = "pdstore.store.redis.store:RedisStore"
_OWN = {
    "memory": "pdstore.store.memory:MemoryStore",
    "file": "pdstore.store.file.store:FileStore",
    **{
        scheme: _REDIS
        for name, secure in (("redis", "rediss"), ("valkey", "valkeys"))
        for scheme in (
            *(name, secure, f"{name}+unix", f"{name}+cluster", f"{secure}+cluster"),
            *(f"{name}+sentinel", f"{secure}+sentinel"),
        )
    },
    "mooncake": "pdstore.store.mooncake.store:MooncakeStore",
    "shm": "pdstore.store.arena.store:ArenaStore",
}
_FAULTY = "pdstore.testing.faulty:Faulty"  # around the store of the rest of the URL
_EXTRAS = {_REDIS: "redis", _OWN["mooncake"]: "mooncake", _FAULTY: "test"}
"""Extras of pdstore that bring a store's library."""


def open_store(url: str, settings: Settings) -> Store:
    """Opens the store at a URL; most stores connect at their first call.

    Raises ConfigError for a bad URL, an unknown scheme or a package whose store cannot be loaded;
    MissingExtra, with the command, where a package is missing.
    """
    entry, parsed = _entry_for(url)
    store = methodcaller("open", parsed, settings)(_load(entry))
    if isinstance(store, Store):
        return store
    raise ConfigError(f"{_place(entry)} opened {type(store).__name__}, which is no pdstore.Store")


def check_url(url: str, settings: Settings) -> None:
    """Raises what `open_store` would, as far as that shows without opening the store."""
    entry, parsed = _entry_for(url)
    found = _load(entry)
    if "check" in vars(found):  # an inherited one is about another class's options
        methodcaller("check", parsed, settings)(found)


def _entry_for(url: str) -> tuple[EntryPoint, StoreURL]:
    """Returns what serves a URL's scheme: pdstore itself, or one package. Raises ConfigError."""
    refuse_slips(url)
    scheme, separator, _ = url.partition("://")
    own = _FAULTY if scheme.startswith("faulty+") else _OWN.get(scheme)
    entries = [EntryPoint(scheme, own, GROUP)] if own else []
    entries += [entry for entry in entry_points(group=GROUP) if entry.name == scheme]
    if not separator or not entries:
        shown = without_secret(url)
        known = ", ".join(f"{name}://" for name in _known() if "+" not in name)
        raise ConfigError(
            f"bad store URL {shown!r}: {_hint(shown)}it must start with one of {known} (redis and"
            " valkey also with +unix, +cluster or +sentinel, as redis+cluster://), or with the"
            " scheme of a package that brings its own store and is not installed here"
        )
    if len(entries) > 1:
        owners = " and by ".join(map(_owner, entries))
        raise ConfigError(f"{scheme}:// is claimed by {owners}: uninstall all but one")
    return entries[0], StoreURL.of(url)


def _known() -> list[str]:
    return [*_OWN, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(_OWN))]


def _hint(url: str) -> str:
    """Returns the likely meaning of a URL of no known scheme, if there is one."""
    scheme, separator, _ = url.partition("://")
    path = url.removeprefix("file:")
    if not separator and path.startswith("/"):
        return f"did you mean file://{path}? "
    near = difflib.get_close_matches(scheme, _known(), n=1) if separator else []
    return f"did you mean {near[0]}://? " if near else ""


def _load(entry: EntryPoint) -> object:
    """Imports what an entry point names. Raises ConfigError, MissingExtra for a missing package."""
    try:
        found: object = entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        if entry.dist is not None:
            raise ConfigError(f"{_place(entry)} cannot be loaded: {error}") from error
        if entry.value not in _EXTRAS or not isinstance(error, ImportError):
            raise
        raise MissingExtra(
            f"{entry.name}:// needs a package that is not installed ({error.name}): "
            f"pip install 'pdstore[{_EXTRAS[entry.value]}]'"
        ) from error
    if not callable(getattr(found, "open", None)):
        raise ConfigError(f"{_place(entry)} has no method `open(url, settings)`")
    return found


def _place(entry: EntryPoint) -> str:
    return f"{entry.value!r} of {_owner(entry)}, which serves {entry.name}://,"


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "pdstore itself"
