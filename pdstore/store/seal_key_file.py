"""read_seal_keys: the keys in the file that PDSTORE_SEAL_KEY_FILE names."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pdstore.errors import ConfigError

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
