"""MooncakeConfig: settings from a URL, the environment and a JSON file, each with its origin."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pdstore.environment import MooncakeSources
from pdstore.errors import ConfigError
from pdstore.store.mooncake.names import NAMES, UNUSED_KEYS, UNUSED_VARIABLES, Value
from pdstore.store.url import StoreURL

DEFAULT_PORT = 50051
DEFAULT_DISCARD_S = 30.0
DEFAULT_LEASE_S = 5.0  # the smallest default of any release of the master


@dataclass(frozen=True)
class MooncakeConfig:
    """Settings of the connections to a Mooncake pool.

    metrics_port: of the master's HTTP server, for listings.
    topology: `holder`: other processes own the values' memory. `embedded`: this process lends
      `segment` bytes. `shared`: as `holder`, but the `mooncake_client` on this host (`client`)
      makes the copies, over shared memory.
    segment, buffer: bytes.
    hostname: the address at which other clients reach this process; "" means this host's address
      towards the master.
    prefer: the segment (host:port) to put to first.
    connections: how many move values; the library copies with one thread for each (over TCP).
    lease_s, discard_s: the master's --default_kv_lease_ttl and --put_start_discard_timeout_sec.
    origins: where each field's value comes from; a field that is not in it has its default.
    """

    master: str = ""
    metrics_port: int = 9003
    topology: str = "holder"
    client: str = "127.0.0.1:50052"
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""
    segment: int = 0
    buffer: int = 16 << 20
    protocol: str = "tcp"
    devices: str = ""
    prefer: str = ""
    tenant: str = "default"
    ssd: bool = False
    ssd_path: str = ""
    http: bool = False
    http_port: int = 9300
    connections: int = 1
    lease_s: float = DEFAULT_LEASE_S
    discard_s: float = DEFAULT_DISCARD_S
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, url: StoreURL, sources: MooncakeSources) -> MooncakeConfig:
        """Reads all sources: the URL overrides the environment, which overrides the file.

        Raises ConfigError for a bad value, and for an unknown name, with the nearest known one.
        """
        found: dict[str, Value] = {}
        origins: dict[str, str] = {}
        layers = (_from_file(sources), _from_environment(sources.variables), _from_url(url))
        for values, names in layers:
            found |= values
            origins |= names
        parsed = {
            name: _parse(name, value, origins[name])
            for name, value in found.items()
            if value is not None and (value != "" or name in ("devices", "hostname"))
        }
        _choose_topology(parsed, origins)
        config = cls(**parsed, origins=origins)  # type: ignore[arg-type]
        config._check(url)
        return config

    @property
    def master_http(self) -> str:
        """The address of the master's HTTP server; useless if there are several masters."""
        return f"{self.master.rpartition(':')[0]}:{self.metrics_port}"

    def describe(self) -> str:
        """Returns every value with its origin, on one line."""
        return ", ".join(
            f"{name}={getattr(self, name)} ({self.origins.get(name, 'default')})"
            for name in NAMES
            if name in _FIELDS
        )

    def _check(self, url: StoreURL) -> None:
        if not self.master:
            raise ConfigError(
                f"{url.label}: the master is missing: write mooncake://HOST:PORT, or set"
                " MOONCAKE_MASTER"
            )
        if self.topology == "embedded" and not self.segment:
            raise ConfigError(
                f"{url.label}: topology=embedded needs the size of the memory that it lends, for"
                " example segment=4GB"
            )
        if self.topology != "embedded" and self.segment:
            where = self.origins.get("segment", "default")
            raise ConfigError(
                f"{url.label}: topology={self.topology} lends no memory: set segment to 0; it is"
                f" {self.segment} bytes now (from: {where})"
            )
        if self.connections > 1 and (self.topology == "shared" or self.protocol != "tcp"):
            raise ConfigError(
                f"{url.label}: connections={self.connections} needs protocol=tcp and a topology"
                " other than shared: shared or registered memory belongs to one connection"
            )


_FIELDS = frozenset(MooncakeConfig.__dataclass_fields__)
_Layer: TypeAlias = tuple[dict[str, Value], dict[str, str]]


def _from_url(url: StoreURL) -> _Layer:
    options = {option: name for name, names in NAMES.items() for option in names.options}
    for option in url.options:
        if option not in options:
            raise ConfigError(f"{url.label}: unknown option {_hint(option, options)}")
    values: dict[str, Value] = {options[name]: text for name, text in url.options.items()}
    if url.path not in ("", "/") or url.more_hosts:
        raise ConfigError(f"{url.label}: a mooncake URL has no path, and one host")
    if url.host:
        host = f"[{url.host}]" if ":" in url.host else url.host
        values["master"] = f"{host}:{url.port or DEFAULT_PORT}"
    url.options.clear()
    return values, dict.fromkeys(values, "URL")


def _from_environment(variables: Mapping[str, str]) -> _Layer:
    known = {variable: name for name, names in NAMES.items() for variable in names.variables}
    every = [*known, *UNUSED_VARIABLES]
    for variable in variables:
        if variable.startswith("MOONCAKE_") and variable not in every:
            near = difflib.get_close_matches(variable, every, n=1, cutoff=0.9)
            if near:  # else it may be one of the library's own many variables
                raise ConfigError(f"unknown variable {variable}: did you mean {near[0]}?")
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for variable, name in reversed(known.items()):
        if variables.get(variable):
            values[name], origins[name] = variables[variable], variable
    return values, origins


def _from_file(sources: MooncakeSources) -> _Layer:
    if sources.text is None:
        return {}, {}
    try:
        document = json.loads(sources.text)
    except ValueError as error:
        raise ConfigError(f"{sources.path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{sources.path} is not a JSON object")
    keys = {key: name for name, names in NAMES.items() for key in names.keys}
    values: dict[str, Value] = {}
    prefixed = {key for key in document if key.startswith("mooncake_")}
    for key in sorted(document, key=prefixed.__contains__):  # a prefixed key comes last, and wins
        plain = key.removeprefix("mooncake_")
        if plain in keys:
            values[keys[plain]] = document[key]
        elif plain not in UNUSED_KEYS:
            raise ConfigError(f"{sources.path}: unknown key {_hint(key, (*keys, *UNUSED_KEYS))}")
    return values, dict.fromkeys(values, str(sources.path))


def _parse(name: str, value: Value, origin: str) -> object:
    try:
        return NAMES[name].parse(value)
    except ValueError as error:
        raise ConfigError(f"mooncake: bad {name} {value!r} ({origin}): {error}") from error


def _choose_topology(parsed: dict[str, object], origins: dict[str, str]) -> None:
    """Derives the topology from other programs' settings where `topology` is not given."""
    mode, standalone = parsed.pop("mode", None), parsed.pop("standalone", False)
    if "topology" in parsed:
        if parsed["topology"] != "embedded" and origins.get("segment") != "URL":
            parsed.pop("segment", None)  # such a segment is meant for other programs on this host
    elif standalone:
        parsed["topology"], origins["topology"] = "shared", origins["standalone"]
        parsed.pop("segment", None)
    elif mode is not None:
        parsed["topology"], origins["topology"] = mode, origins["mode"]
    elif parsed.get("segment"):
        parsed["topology"], origins["topology"] = "embedded", origins["segment"]


def _hint(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if near:
        return f"{name!r}: did you mean {near[0]!r}?"
    return f"{name!r}; known: {', '.join(sorted(known))}"
