"""open_store: from a URL to a store, pdstore's own or one of an installed package; its check."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol, cast

from pdstore.errors import ConfigError, MissingExtra
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.url import StoreURL, refuse_slips, without_secret

GROUP = "pdstore.stores"
"""The entry-point group in which a package names its stores: `scheme = "module:Class"`."""


class StoreClass(Protocol):
    """The object that an entry point names, usually a class of stores."""

    def open(self, url: StoreURL, settings: Settings) -> Store:
        """Returns the store at a URL of this scheme, not connected yet.

        Takes its options from `url` and calls `url.finish` to refuse the others. `settings` say
        what is not in the URL, such as how long a value lives. Raises ConfigError.
        """


class ChecksURL(Protocol):
    """A store class that can tell a bad URL without opening it; an engine asks before it starts."""

    def check(self, url: StoreURL, settings: Settings) -> None:
        """Raises ConfigError for what `open` would refuse in the URL or the settings.

        Takes the options, as `open` does. Makes, connects and logs nothing.
        """


class _Own(NamedTuple):
    module: str
    name: str
    extra: str | None  # the extra of pdstore that brings the store's library


_OWN = {
    "memory": _Own("pdstore.store.memory", "MemoryStore", None),
    "file": _Own("pdstore.store.file.store", "FileStore", None),
    **{
        scheme: _Own("pdstore.store.redis.store", "RedisStore", "redis")
        for name, secure in (("redis", "rediss"), ("valkey", "valkeys"))
        for scheme in (
            *(name, secure, f"{name}+unix", f"{name}+cluster", f"{secure}+cluster"),
            *(f"{name}+sentinel", f"{secure}+sentinel"),
        )
    },
    "mooncake": _Own("pdstore.store.mooncake.store", "MooncakeStore", "mooncake"),
    "shm": _Own("pdstore.store.arena.store", "ArenaStore", None),
}
_AROUND_OTHERS = {"faulty+": _Own("pdstore.testing.faulty", "Faulty", "test")}
"""Prefixes of schemes that wrap the store of the rest of the URL."""


def open_store(url: str, settings: Settings) -> Store:
    """Opens the store at a URL; most stores connect at their first call.

    Raises ConfigError for a bad URL, an unknown scheme or a package whose store cannot be loaded;
    MissingExtra, with the command, where a package is missing.
    """
    own, foreign = _served(url)
    parsed = StoreURL.of(url)
    if own is not None:
        return _load_own(parsed.scheme, own).open(parsed, settings)
    store = _load_foreign(foreign[0], parsed.scheme).open(parsed, settings)
    if not isinstance(store, Store):
        place = _place(foreign[0], parsed.scheme)
        raise ConfigError(f"{place} opened {type(store).__name__}, which is no pdstore.Store")
    return store


def check_url(url: str, settings: Settings) -> None:
    """Raises what `open_store` would, as far as that shows without opening the store."""
    own, foreign = _served(url)
    parsed = StoreURL.of(url)
    scheme = parsed.scheme
    found = _load_own(scheme, own) if own is not None else _load_foreign(foreign[0], scheme)
    if "check" in vars(found):  # an inherited one is about another class's options
        cast(ChecksURL, found).check(parsed, settings)


def _served(url: str) -> tuple[_Own | None, Sequence[EntryPoint]]:
    """Returns who serves a URL's scheme: pdstore itself, or one package. Raises ConfigError."""
    refuse_slips(url)
    scheme, separator, _ = url.partition("://")
    own = _OWN.get(scheme) or _AROUND_OTHERS.get(scheme.partition("+")[0] + "+")
    foreign = [entry for entry in entry_points(group=GROUP) if entry.name == scheme]
    if not separator or (own is None and not foreign):
        shown = without_secret(url)
        known = ", ".join(f"{name}://" for name in _known() if "+" not in name)
        raise ConfigError(
            f"bad store URL {shown!r}: {_hint(shown)}it must start with one of {known} (redis and"
            " valkey also with +unix, +cluster or +sentinel, as redis+cluster://), or with the"
            " scheme of a package that brings its own store and is not installed here"
        )
    if len(foreign) + (own is not None) > 1:
        raise ConfigError(_clash(scheme, own, foreign))
    return own, foreign


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


def _clash(scheme: str, own: _Own | None, foreign: Sequence[EntryPoint]) -> str:
    owners = ["pdstore itself"] if own else []
    owners += [_distribution_of(entry) for entry in foreign]
    return f"{scheme}:// is claimed by {' and by '.join(owners)}: uninstall all but one"


def _load_own(scheme: str, own: _Own) -> StoreClass:
    try:
        module = importlib.import_module(own.module)
    except ImportError as error:
        if own.extra is None:
            raise
        raise MissingExtra(
            f"{scheme}:// needs a package that is not installed ({error.name}): "
            f"pip install 'pdstore[{own.extra}]'"
        ) from error
    found: StoreClass = getattr(module, own.name)
    return found


def _load_foreign(entry: EntryPoint, scheme: str) -> StoreClass:
    place = _place(entry, scheme)
    try:
        found: StoreClass = entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{place} cannot be loaded: {error}") from error
    if not callable(getattr(found, "open", None)):
        raise ConfigError(f"{place} has no method `open(url, settings)`")
    return found


def _place(entry: EntryPoint, scheme: str) -> str:
    return f"{entry.value!r} of {_distribution_of(entry)}, which serves {scheme}://,"


def _distribution_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
