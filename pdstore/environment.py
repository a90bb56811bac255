"""Environment variables that are not pdstore's own: cache directories, Mooncake's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError

_MOONCAKE_FILE = "MOONCAKE_CONFIG_PATH"


def default_pool_directory() -> Path:
    """Returns the directory of this user where `file://` without a path keeps its blocks."""
    return _cache_directory() / "pool"


def weights_cache_file() -> Path:
    """Returns the file in which digests of weight files are remembered."""
    return _cache_directory() / "weights.json"


class MooncakeSources(NamedTuple):
    """Mooncake's settings in the environment.

    variables: those named MOONCAKE_*.
    path, text: the JSON file that MOONCAKE_CONFIG_PATH names, and its content; None without it.
    """

    variables: dict[str, str]
    path: str | None
    text: str | None


def mooncake_sources() -> MooncakeSources:
    """Returns Mooncake's variables and JSON file. Raises ConfigError if the file cannot be read."""
    variables = {name: of for name, of in os.environ.items() if name.startswith("MOONCAKE_")}
    path = variables.get(_MOONCAKE_FILE)
    if not path:
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
