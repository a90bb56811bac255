"""MooncakeConfig: the options of a `mooncake://` URL. Library: Mooncake's module and its codes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import socket
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from pdstore.environment import mooncake_sources, set_missing_variables
from pdstore.errors import (
    ConfigError,
    MissingExtra,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.settings import parse_size
from pdstore.store.mooncake.others import Given, fields_of_others
from pdstore.store.url import StoreURL, without_secret

log = logging.getLogger(__name__)

_Size: TypeAlias = Annotated[int, BeforeValidator(partial(parse_size, unit=1024))]
_Topology: TypeAlias = Annotated[Literal["holder", "embedded"], BeforeValidator(str.lower)]
_NICs: TypeAlias = Annotated[str, AfterValidator(lambda text: text.replace("auto-discovery", ""))]


class MooncakeConfig(BaseModel, frozen=True, extra="forbid"):
    """The options of a `mooncake://` URL, which describe the connections to a Mooncake pool.

    master: the master's host and port.
    metrics_port: the port of the master's HTTP server, which lists values.
    topology: who lends memory for values. `holder`: others; `embedded`: this one, `segment` bytes.
    segment, buffer: bytes of the segment, lent if `embedded`, and of the library's own buffer.
    hostname: the address at which other clients reach this process; "" means this host's address
      towards the master.
    prefer: the segment (host:port) that a put should use if it can.
    ssd_path: where an `embedded` process moves values when its memory is full; "": nowhere.
    connections: the number of connections that move values. Over TCP, each has its own thread of
      the library. None means 8 over TCP, else 1.
    lease: the master's --default_kv_lease_ttl, in seconds. The default is the smallest default of
      all Mooncake releases.
    origins: where each value comes from, `URL`, a variable or a key of a file, by field; a field
      that is missing has its default.
    not_lent: the segment that others' settings name, and that `holder` does not lend; else "".
    """

    master: str
    metrics_port: int = Field(9003, gt=0, lt=65536)
    topology: _Topology = "holder"
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""
    segment: _Size = 0
    buffer: _Size = 16 << 20
    protocol: Annotated[str, AfterValidator(str.lower)] = "tcp"
    devices: _NICs = ""
    prefer: str = ""
    tenant: str = "default"
    ssd_path: str = ""
    connections: int | None = Field(None, gt=0, le=64)
    lease: float = Field(5.0, gt=0, lt=1e6)
    origins: Mapping[str, str] = Field({}, exclude=True, repr=False)
    not_lent: str = Field("", exclude=True, repr=False)

    @classmethod
    def from_url(cls, url: StoreURL) -> MooncakeConfig:
        """Reads a URL's host and options; without a host, also what others' settings say.

        What the URL names wins. Raises ConfigError, which suggests an option's name.
        """
        known = sorted(cls.model_fields.keys() - {"master", "origins", "not_lent"})
        for option in url.options.keys() - known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{url.label}: unknown option {option!r}{hint}")
        if url.path not in ("", "/") or url.more_hosts:
            raise ConfigError(f"{url.label}: write mooncake://HOST:PORT, of the one master")
        found = {name: Given(text, "URL") for name, text in url.options.items() if text}
        url.options.clear()
        if url.host:
            host = f"[{url.host}]" if ":" in url.host else url.host
            found["master"] = Given(f"{host}:{url.port or 50051}", "URL")
            return cls._made(url, found)
        found = {**fields_of_others(mooncake_sources()), **found}
        if "master" not in found:
            raise ConfigError(
                f"{url.label}: the master is missing: write mooncake://HOST:PORT, or set"
                " MOONCAKE_MASTER=HOST:PORT, or MOONCAKE_CONFIG_PATH to a JSON file with"
                " master_server_address"
            )
        return cls._made(url, found)

    @classmethod
    def _made(cls, url: StoreURL, found: dict[str, Given]) -> MooncakeConfig:
        lends = "topology" in found and str(found["topology"].value).lower() == "embedded"
        not_lent = ""
        if "segment" in found and found["segment"].origin != "URL" and not lends:
            segment = found.pop("segment")  # other programs lend it
            not_lent = f"{segment.value} ({segment.origin})"
        values: dict[str, Any] = {name: given.value for name, given in found.items()}
        origins = {name: given.origin for name, given in found.items()}
        try:
            config = cls(**values, origins=origins, not_lent=not_lent)
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            name = str(first["loc"][0])
            problem = first["msg"].removeprefix("Value error, ")
            origin = origins.get(name)
            where = "" if origin == "URL" else f" ({origin})"
            raise ConfigError(
                f"{url.label}: bad {name} {first['input']!r}{where}: {problem}"
            ) from error
        config._check(url)
        return config

    def described(self) -> str:
        """Returns one line with the settings that are not defaults, and where each was set."""
        values = {name: without_secret(str(getattr(self, name))) for name in self.origins}
        shown = ", ".join(f"{name}={values[name]} ({of})" for name, of in self.origins.items())
        if self.not_lent:
            shown += f"; a segment of {self.not_lent} is not lent: topology=embedded would lend it"
        return shown

    @property
    def is_tcp(self) -> bool:
        """True if the transport is TCP, which moves any memory; others need registered memory."""
        return self.protocol == "tcp"

    @property
    def num_connections(self) -> int:
        """The most connections that move values at the same time."""
        return self.connections or (8 if self.is_tcp else 1)

    @property
    def master_http(self) -> str:
        """The address, host and port, of the master's HTTP server."""
        return f"{self.master.rpartition(':')[0]}:{self.metrics_port}"

    def _check(self, url: StoreURL) -> None:
        lends = self.topology == "embedded"
        problems = {
            "topology=embedded needs the size of the memory that it lends: segment=4GB": (
                lends and not self.segment
            ),
            f"topology={self.topology} lends no memory: write topology=embedded, or no segment": (
                self.segment and not lends
            ),
            f"connections={self.connections} needs protocol=tcp: registered memory belongs to one"
            " connection": self.num_connections > 1 and not self.is_tcp,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ConfigError(f"{url.label}: {problem}")


VARIABLES = {
    "MC_LOG_LEVEL": "WARNING",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",  # fewer lanes would wait for a hung peer more often
}
"""Environment variables of the library, set unless the user has. Its own default waits 30 s."""

NO_ROOM = -200
INVALID = -600
HALF_WRITTEN = -703
ABSENT = -704
LEASE_OVER = -707
TRANSFER_FAILED = -800

_CODES: dict[int, tuple[str, type[StoreError]]] = {
    -1: ("internal error", StoreUnavailable),
    NO_ROOM: ("no room", StoreFull),
    INVALID: ("invalid arguments", StoreError),
    -601: ("another client replaced it", StoreError),
    -700: ("no readable replica", StoreError),
    -701: ("no readable replica", StoreError),
    -702: ("no readable replica", StoreError),
    HALF_WRITTEN: ("half-written", StoreError),
    ABSENT: ("not stored", StoreError),
    LEASE_OVER: ("the lease ended during the read", StoreError),
    TRANSFER_FAILED: ("the process that holds the memory does not answer", StoreUnavailable),
    -900: ("the master does not answer", StoreUnavailable),
    -901: ("the master did not answer in time", StoreTimeout),
    -1700: ("the tenant's quota is used up", StoreFull),
    -1701: ("the tenant is not registered at the master", StoreDenied),
    -1702: ("the tenant is not empty", StoreDenied),
}
"""The meaning of each error code of the library, and the exception that it becomes."""

MISSES = frozenset({-700, -701, -702, HALF_WRITTEN, ABSENT, LEASE_OVER, TRANSFER_FAILED})
"""Codes of a read whose value cannot be read now. They count as misses, not as errors."""

_INSTALL = "pip install 'pdstore[mooncake]', or without a GPU 'pdstore[mooncake-cpu]'"
_MISSING = f"mooncake:// needs Mooncake's library: {_INSTALL}"

Raw: TypeAlias = Any
"""A connection: the library's class MooncakeDistributedStore, which has no type annotations.

A negative result is an error code. All of its calls but `close` let other Python threads run.
"""


def name_of(code: int) -> str:
    """Returns the meaning of an error code, followed by the code itself."""
    return f"{_CODES.get(code, ('error', StoreError))[0]} ({code})"


def is_outage(code: int) -> bool:
    """True if an error code says that the master does not answer."""
    return code in (-1, -900, -901) or -1012 <= code <= -1000


def error_of(code: int, what: str, *, num_done: int = 0) -> StoreError:
    """Returns the exception for an error code; `what` names the store, the verb and the key."""
    _, kind = _CODES.get(code, ("", StoreUnavailable if is_outage(code) else StoreError))
    return kind(f"{what}: {name_of(code)}", num_done=num_done)


class Library:
    """Imports Mooncake's module and makes its objects.

    Raises MissingExtra, with the command that installs what is missing.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._hostname = config.hostname or _address_towards(config.master)
        set_missing_variables({**VARIABLES, "MC_TCP_BIND_ADDRESS": self._hostname.split(":")[0]})
        self._module = _load()

    def connect_data(self, *, is_first: bool = True) -> Raw | int:
        """Returns an object that moves values, or the error code of its setup if that failed.

        is_first: False for an object that lends no memory, because another object lends it.
        """
        config = self._config
        segment = config.segment if is_first and config.topology == "embedded" else 0
        return self._set_up(segment, config.buffer, config.protocol, config.devices)

    def connect_lookup(self) -> Raw | int:
        """Returns an object for the master only, or the error code of its setup if that failed."""
        return self._set_up(0, 0, "rpc_only", "")

    def put_config(self, *, is_pinned: bool) -> object:
        """Returns an object that tells the library how to keep values: evictable, or pinned."""
        config = self._module.ReplicateConfig()
        config.with_hard_pin = is_pinned
        if self._config.prefer:
            config.preferred_segment = self._config.prefer
        if hasattr(config, "data_type"):
            config.data_type = self._module.ObjectDataType.KVCACHE
        return config

    def _set_up(self, segment: int, buffer: int, protocol: str, devices: str) -> Raw | int:
        config = self._config
        raw = self._module.MooncakeDistributedStore()
        given = (self._hostname, config.metadata, segment, buffer, protocol, devices, config.master)
        keywords: dict[str, str | bool] = {}
        if config.tenant != "default":
            keywords["tenant_id"] = config.tenant
        if segment and config.ssd_path:
            keywords |= {"enable_ssd_offload": True, "ssd_offload_path": config.ssd_path}
        return int(raw.setup(*given, **keywords)) or raw


def check_installed() -> None:
    """Raises MissingExtra if Mooncake's package is not installed. Imports nothing."""
    if importlib.util.find_spec("mooncake") is None:
        raise MissingExtra(_MISSING)


def _load() -> ModuleType:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MissingExtra(_MISSING) from error
    except ImportError as error:  # a shared library of the module is missing
        remedy = f"if this machine has no GPU, install the other one: {_INSTALL}"
        if any(name in str(error) for name in ("libibverbs", "libcurl", "libnuma")):
            remedy = "as root: apt-get install libibverbs1 libcurl4 libnuma1"
        raise MissingExtra(f"Mooncake's library cannot be loaded ({error}); {remedy}") from error


def _address_towards(master: str) -> str:
    """Returns the address from which this host would reach the master; sends nothing."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError, TypeError):  # the host name is unknown or invalid
        return "127.0.0.1"
