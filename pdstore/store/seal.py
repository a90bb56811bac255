"""seal_store: a store with its values encrypted under the keys of PDSTORE_SEAL_KEY_FILE."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from pdstore.errors import ConfigError, MissingExtra
from pdstore.settings import Settings
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Store
from pdstore.store.optional import find_optional
from pdstore.store.wrappers import WrapperStore

log = logging.getLogger(__name__)


def seal_store(store: Store, settings: Settings) -> Store:
    """Returns a store that encrypts; the store itself if it does so already or without the setting.

    Raises ConfigError for a key file that cannot be used, MissingExtra without `cryptography`.
    """
    if settings.seal_key_file is None:
        return store
    keys = read_seal_keys(settings.seal_key_file)
    try:  # not at the top: the bare install has no `cryptography`
        from pdstore.format.envelope import Envelopes
        from pdstore.store.encrypted import Encrypted
    except ImportError as error:
        raise MissingExtra(
            f"PDSTORE_SEAL_KEY_FILE needs a package that is not installed ({error.name}):"
            " pip install 'pdstore[seal]'"
        ) from error
    inner = store
    while isinstance(inner, WrapperStore):
        if isinstance(inner, Encrypted):
            return store
        inner = inner.wrapped
    envelopes = Envelopes(keys)
    how = ", through staging" if find_optional(store, ArenaStore) else ""
    log.info("%s: values are encrypted%s; seal key %s", store.label, how, envelopes.key_id.hex())
    return Encrypted(store, envelopes)


_NAME = "PDSTORE_SEAL_KEY_FILE"
_MAKE = "(umask 077; openssl rand -hex 32 > seal.key)"
_MOST_KEYS = 2
_MOST_BYTES = 4096
_KEY = re.compile("[0-9a-fA-F]{64}")


def read_seal_keys(path: Path) -> list[bytes]:
    """Returns the seal keys in a file, the one that encrypts first.

    The file has one key a line, or two during a rotation, each of 64 hex digits; empty lines and
    lines that begin with # do not count. Only its owner may read it.
    Raises ConfigError, which never quotes the file.
    """
    lines = [line.strip() for line in _text_of(path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= _MOST_KEYS:
        raise ConfigError(
            f"{_NAME}: {path} has {len(keys)} keys: write one, or two during a rotation;"
            f" make one with {_MAKE}"
        )
    if not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(f"{_NAME}: a key in {path} is not 64 hex digits; make one with {_MAKE}")
    found = [bytes.fromhex(key) for key in keys]
    if len(set(found)) < len(found):
        raise ConfigError(f"{_NAME}: both keys in {path} are the same one")
    return found


def _text_of(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # links are how secrets are mounted
    except OSError as error:
        raise ConfigError(
            f"{_NAME}: cannot read {path} ({error.strerror}); make a key with {_MAKE}"
        ) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{_NAME}: {path} is not a file")
        if mode & 0o077:
            raise ConfigError(
                f"{_NAME}: other users may read {path} (mode {stat.S_IMODE(mode):o}): chmod 600 it"
            )
        data = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_BYTES or not data.isascii():
        raise ConfigError(f"{_NAME}: {path} is no key file; make one with {_MAKE}")
    return data.decode("ascii")
