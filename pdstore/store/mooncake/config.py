"""MooncakeConfig: settings from a URL, the environment and a JSON file, each with its origin."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from pdstore.environment import MooncakeSources
from pdstore.errors import ConfigError
from pdstore.store.url import StoreURL

log = logging.getLogger(__name__)

_NAMES_OF_OTHERS = {
    "master": ("master_server_address", "MOONCAKE_MASTER"),
    "metadata": ("metadata_server", "MOONCAKE_TE_META_DATA_SERVER"),
    "hostname": ("local_hostname", "MOONCAKE_LOCAL_HOSTNAME"),
    "segment": ("global_segment_size", "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
    "buffer": ("local_buffer_size", "MOONCAKE_LOCAL_BUFFER_SIZE"),
    "protocol": ("protocol", "MOONCAKE_PROTOCOL"),
    "devices": ("device_name", "MOONCAKE_DEVICE"),
    "tenant": ("tenant_id", "MOONCAKE_TENANT_ID"),
}
"""Mooncake's own names of fields, in its JSON file and in the environment."""
_MASTER_OF_SCRIPTS = "MOONCAKE_MASTER_SERVER_ADDR"  # FastDeploy's; MOONCAKE_MASTER wins
_POWERS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> int:
    """Reads a number of bytes, or a number with a unit of 1,024 (`4gb`, `512 MiB`, `1.5g`)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(?:i?b)?)\s*", str(value).lower())
    if match is None:
        raise ValueError("write bytes, or a number and a unit, like 4GB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2]])


_Size: TypeAlias = Annotated[int, BeforeValidator(parse_size)]
_Topology: TypeAlias = Annotated[
    Literal["holder", "embedded", "shared"], BeforeValidator(str.lower)
]
_NICs: TypeAlias = Annotated[str, AfterValidator(lambda text: text.replace("auto-discovery", ""))]


class MooncakeConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of the connections to a Mooncake pool.

    metrics_port: of the master's HTTP server, for listings.
    topology: `holder`: other processes own the values' memory. `embedded`: this process lends
      `segment` bytes. `shared`: as `holder`, but the `mooncake_client` on this host (`client`)
      makes the copies, over shared memory.
    segment, buffer: bytes. Others' settings of a segment are for their programs: it is lent only
      with `topology=embedded`.
    hostname: the address at which other clients reach this process; "" means this host's address
      towards the master.
    prefer: the segment (host:port) to put to first.
    ssd_path: a directory to which an `embedded` process moves values that its memory is too small
      for; "" means none.
    connections: how many move values; the library copies with one thread for each (over TCP).
    lease: the master's --default_kv_lease_ttl, in seconds; by default the smallest of any release.
    origins: where each field's value comes from; a field that is not in it has its default.
    """

    master: str = ""
    metrics_port: int = Field(9003, gt=0, lt=65536)
    topology: _Topology = "holder"
    client: str = "127.0.0.1:50052"
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""
    segment: _Size = 0
    buffer: _Size = 16 << 20
    protocol: Annotated[str, AfterValidator(str.lower)] = "tcp"
    devices: _NICs = ""
    prefer: str = ""
    tenant: str = "default"
    ssd_path: str = ""
    connections: int = Field(1, gt=0, le=64)
    lease: float = Field(5.0, gt=0, lt=1e6)
    origins: Mapping[str, str] = Field({}, exclude=True, repr=False)

    @classmethod
    def from_url(cls, url: StoreURL, sources: MooncakeSources) -> MooncakeConfig:
        """Reads all sources: the URL overrides the environment, which overrides the file.

        An empty value counts as none. Raises ConfigError for a bad value, and for a name that is
        nearly a known one.
        """
        found: dict[str, tuple[object, str]] = {}
        for layer in (_from_file(sources), _from_environment(sources.variables), _from_url(url)):
            found |= {name: (value, origin) for name, value, origin in layer if value != ""}
        origins = {name: origin for name, (_, origin) in found.items()}
        try:
            config = cls(origins=origins, **{name: value for name, (value, _) in found.items()})  # type: ignore[arg-type]
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            name = str(first["loc"][0])
            raise ConfigError(
                f"mooncake: bad {name} {first['input']!r} ({origins[name]}): {first['msg']}"
            ) from error
        config._check(url)
        return config

    @property
    def master_http(self) -> str:
        """The address of the master's HTTP server; useless if there are several masters."""
        return f"{self.master.rpartition(':')[0]}:{self.metrics_port}"

    def describe(self) -> str:
        """Returns every value with its origin, on one line."""
        return ", ".join(
            f"{name}={value} ({self.origins.get(name, 'default')})"
            for name, value in self.model_dump().items()
        )

    def _check(self, url: StoreURL) -> None:
        lends, is_tcp = self.topology == "embedded", self.protocol == "tcp"
        problems = {
            "the master is missing: write mooncake://HOST:PORT, or set MOONCAKE_MASTER": (
                not self.master
            ),
            "topology=embedded needs the size of the memory that it lends: segment=4GB": (
                lends and not self.segment
            ),
            f"topology={self.topology} lends no memory: write topology=embedded, or no segment": (
                self.segment and self.origins.get("segment") == "URL" and not lends
            ),
            f"connections={self.connections} needs protocol=tcp and a topology other than shared:"
            " shared or registered memory belongs to one connection": (
                self.connections > 1 and (self.topology == "shared" or not is_tcp)
            ),
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ConfigError(f"{url.label}: {problem}")


_Layer: TypeAlias = Iterator[tuple[str, object, str]]  # fields, values, where these come from


def _from_url(url: StoreURL) -> _Layer:
    known = sorted(MooncakeConfig.model_fields.keys() - {"master", "origins"})
    for option in url.options.keys() - known:
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
        raise ConfigError(f"{url.label}: unknown option {option!r}{hint}")
    if url.path not in ("", "/") or url.more_hosts:
        raise ConfigError(f"{url.label}: a mooncake URL has no path, and one host")
    if url.host:
        host = f"[{url.host}]" if ":" in url.host else url.host
        yield "master", f"{host}:{url.port or 50051}", "URL"
    for option, text in url.options.items():
        yield option, text, "URL"
    url.options.clear()


def _from_environment(variables: Mapping[str, str]) -> _Layer:
    known = {variable: name for name, (_, variable) in _NAMES_OF_OTHERS.items()}
    _refuse_slips("variable", variables, [*known, "MOONCAKE_CONFIG_PATH", _MASTER_OF_SCRIPTS])
    if not variables.get("MOONCAKE_MASTER"):
        yield "master", variables.get(_MASTER_OF_SCRIPTS, ""), _MASTER_OF_SCRIPTS
    for variable, name in known.items():
        yield name, variables.get(variable, ""), variable


def _from_file(sources: MooncakeSources) -> _Layer:
    if sources.text is None:
        return
    try:
        document = json.loads(sources.text)
    except ValueError as error:
        raise ConfigError(f"{sources.path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{sources.path} is not a JSON object")
    known = {key: name for name, (key, _) in _NAMES_OF_OTHERS.items()}
    _refuse_slips(f"key in {sources.path}:", document, known)
    if others := sorted(document.keys() - known):
        log.info("%s: pdstore does not read %s", sources.path, ", ".join(others))
    for key in document.keys() & known:
        yield known[key], document[key], str(sources.path)


def _refuse_slips(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for a name that nearly is a known one; others are other programs'."""
    for name in names:
        near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.9)
        if near and name not in known:
            raise ConfigError(f"unknown {what} {name}: did you mean {near[0]}?")
