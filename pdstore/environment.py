"""Environment variables that are not pdstore's own: cache directories, Mooncake's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError

_MOONCAKE_FILES = ("MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH")
_MOONCAKE_OTHERS = frozenset({"LOCAL_HOSTNAME", *_MOONCAKE_FILES})


def default_pool_directory() -> Path:
    """Returns the directory of this user where `file://` without a path keeps its blocks."""
    return _cache_directory() / "pool"


def weights_cache_file() -> Path:
    """Returns the file in which digests of weight files are remembered."""
    return _cache_directory() / "weights.json"


class MooncakeSources(NamedTuple):
    """Mooncake's settings in the environment.

    variables: those named MOONCAKE_*, MC_*, and the ones that other users of Mooncake read.
    path, text: the JSON file that one of them names, and its content; None when none does.
    """

    variables: dict[str, str]
    path: str | None
    text: str | None


def mooncake_sources() -> MooncakeSources:
    """Returns Mooncake's variables and JSON file. Raises ConfigError if the file cannot be read."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("MOONCAKE_", "MC_")) or name in _MOONCAKE_OTHERS
    }
    path = next((variables[name] for name in _MOONCAKE_FILES if variables.get(name)), None)
    if path is None:
        return MooncakeSources(variables, None, None)
    try:
        return MooncakeSources(variables, path, Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read Mooncake's configuration file {path}: {error}") from error


def set_missing_variables(defaults: Mapping[str, str]) -> None:
    """Sets variables of a library that is not imported yet, except those that the user set."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def native_cache_directory() -> Path:
    """Returns the directory where a checkout keeps the native library that it built."""
    return _cache_directory() / "native"


def _cache_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pdstore"
