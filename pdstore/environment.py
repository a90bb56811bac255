"""Environment variables of other programs, and names that look like misspelt settings."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError

PREFIX = "PDSTORE_"
"""The prefix of the variables of pdstore's settings."""


def cache_directory(name: str) -> Path:
    """Returns a directory in this user's cache: `pool` for `file://`, `native` for built code."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pdstore" / name


def set_missing_variables(defaults: Mapping[str, str]) -> None:
    """Sets environment variables, before a library reads them, unless the user has set them."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def plugins_of_vllm() -> list[str] | None:
    """Returns the names in VLLM_PLUGINS, with their blanks as vLLM does; None if it is not set."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else names.split(",")


_FILES_OF_MOONCAKE = ("MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH")


class MooncakeSources(NamedTuple):
    """Mooncake's settings in the environment, as other programs keep them.

    variables: those named MOONCAKE_*.
    path, text: the JSON file that a variable names, and what it contains; None if there is none.
    """

    variables: dict[str, str]
    path: str | None = None
    text: str | None = None


def mooncake_sources() -> MooncakeSources:
    """Returns Mooncake's variables and JSON file. Raises ConfigError if the file cannot be read."""
    variables = {name: of for name, of in os.environ.items() if name.startswith("MOONCAKE_")}
    named = next((name for name in _FILES_OF_MOONCAKE if os.environ.get(name)), None)
    if named is None:
        return MooncakeSources(variables)
    path = os.environ[named]
    try:
        return MooncakeSources(variables, path, Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read Mooncake's file {path}, of {named}: {error}") from error


_NEAR = 0.82  # a misspelt name is at least as similar as this
_NEAR_REST = 0.65  # the same of what follows PDSTORE_ in a name
_SYNONYMS = {
    **dict.fromkeys(("URL", "URI", "POOL", "BACKEND", "REDIS", "REDIS_URL"), "STORE"),
    **dict.fromkeys(("ADDRESS", "HOST", "PATH", "DIR", "DIRECTORY", "CACHE_DIR"), "STORE"),
    **dict.fromkeys(("TIMEOUT", "TIMEOUT_S"), "DEADLINE_S"),
    **dict.fromkeys(("PORT", "HTTP_PORT", "METRICS_PORT"), "STATUS_PORT"),
    **dict.fromkeys(("TTL", "TTL_S"), "BLOCK_TTL_S"),
    **dict.fromkeys(("BLOCK_SIZE", "PAGE_SIZE", "CHUNK_SIZE"), "BLOCK_TOKENS"),
    **dict.fromkeys(("WAIT", "WAIT_S"), "HANDOFF_WAIT_S"),
}
"""Names that users guess, and the setting that each means; both without PDSTORE_."""
_LOG_LEVELS = ("PDSTORE_LOG_LEVEL", "PDSTORE_LOGGING_LEVEL", "PDSTORE_DEBUG")
_LOGGING = "pdstore logs at the engine's level (VLLM_LOGGING_LEVEL)"
_OF_KUBERNETES = re.compile(  # it sets these in pods if a Service is called pdstore or pdstore-*
    r"PDSTORE_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP).*)"
)
ADDRESS_OF_KUBERNETES = ("tcp://", "udp://", "sctp://")


def refuse_slips(known: Set[str], prefix: str) -> None:
    """Raises ConfigError for an environment variable whose name seems to be misspelt.

    Without the error, a misspelt PD_TRANSFER_VIA_STORAGE would leave the pool unused.

    prefix: an unknown name that begins with this prefix is refused even if no known name is near.
    """
    for name in os.environ:
        upper = name.upper()
        if name in known or not upper.startswith("PD") or is_of_kubernetes(name):
            continue
        near = meant_by(upper, known)
        if near or upper.startswith(prefix):
            hint = f"did you mean {near}?" if near else "docs/settings.md lists them all"
            hint = _LOGGING if upper in _LOG_LEVELS else hint
            raise ConfigError(f"unknown setting {name}: {hint}")


def is_of_kubernetes(name: str) -> bool:
    """True if Kubernetes sets this variable, with its present value, for a Service."""
    is_address = os.environ[name].startswith(ADDRESS_OF_KUBERNETES)
    return (name.endswith("PORT") and is_address) or bool(_OF_KUBERNETES.fullmatch(name))


def meant_by(upper: str, known: Set[str]) -> str:
    """Returns the variable that a wrong name, in capitals, stands for; "" if none is near.

    A name is compared without PDSTORE_ or PD_, which would make all names look alike.
    """
    rests = {name.removeprefix(PREFIX).removeprefix("PD_"): name for name in known}
    rest = upper.removeprefix(PREFIX).removeprefix("PD_")
    rest = _SYNONYMS.get(rest, rest) if upper.startswith(PREFIX) else rest
    if rest in rests and rest != upper:
        return rests[rest]
    near = difflib.get_close_matches(upper, known, n=1, cutoff=_NEAR)
    if upper.startswith(PREFIX):
        found = difflib.get_close_matches(rest, rests, n=1, cutoff=_NEAR_REST)
        near = [rests[one] for one in found]
    return near[0] if near else ""
