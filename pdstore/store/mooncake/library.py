"""Library: Mooncake's Python module: how it is imported and called, and what its codes mean."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import socket
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeAlias

from pdstore.environment import set_missing_variables
from pdstore.errors import (
    MissingExtra,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.store.mooncake.config import MooncakeConfig

log = logging.getLogger(__name__)

VARIABLES = {
    "MC_LOG_LEVEL": "WARNING",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",  # a batch waits for a hung peer once per round of lanes
}
"""Values of the library's own variables that the user did not set: its defaults wait 30 s.

None of them affects its calls to the process that shares our memory: see `batches`.
"""

NO_ROOM = -200
INVALID = -600
HALF_WRITTEN = -703
ABSENT = -704
LEASE_OVER = -707
TRANSFER_FAILED = -800

_CODES: dict[int, tuple[str, type[StoreError]]] = {
    -1: ("internal error", StoreUnavailable),  # also: whoever shares our memory is gone
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
"""Meanings of the result codes, and the errors that they become."""

MISSES = frozenset({-700, -701, -702, HALF_WRITTEN, ABSENT, LEASE_OVER, TRANSFER_FAILED})
"""Codes of a read whose value cannot be had now: a miss, not an error."""

_INSTALL = "pip install 'pdstore[mooncake]', or without a GPU 'pdstore[mooncake-cpu]'"
_MISSING = f"mooncake:// needs Mooncake's library: {_INSTALL}"


Allocator: TypeAlias = Any
Raw: TypeAlias = Any
"""The library's MooncakeDistributedStore, a connection. It has no types of its own.

A negative result is a code. All its calls but `close` let other Python threads run.
"""


def name_of(code: int) -> str:
    """Returns the meaning of a code, followed by the code."""
    return f"{_CODES.get(code, ('error', StoreError))[0]} ({code})"


def is_outage(code: int) -> bool:
    """True if the master, or the process that shares our memory, does not answer."""
    return code in (-1, -900, -901) or -1012 <= code <= -1000


def error_of(code: int, what: str, *, num_done: int = 0) -> StoreError:
    """Returns the exception for a code; `what` names the store, the verb and the key."""
    _, kind = _CODES.get(code, ("", StoreUnavailable if is_outage(code) else StoreError))
    return kind(f"{what}: {name_of(code)}", num_done=num_done)


@contextlib.contextmanager
def counted_from(num_done: int) -> Iterator[None]:
    """Adds the keys that were served before to what an error of the calls inside counts."""
    try:
        yield
    except StoreError as error:
        error.num_done += num_done
        raise


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
        """Returns an object that moves values, or the code of its setup if that failed.

        is_first: False for one that lends no memory, because another of this process does.
        """
        config = self._config
        if config.topology == "shared":
            raw = self._module.MooncakeDistributedStore()
            code = raw.setup_dummy(0, 0, config.client)
            return code or raw
        segment = config.segment if is_first and config.topology == "embedded" else 0
        return self._set_up(segment, config.buffer, config.protocol, config.devices)

    def connect_lookup(self) -> Raw | int:
        """Returns an object that only talks to the master, or the code of its setup."""
        return self._set_up(0, 0, "rpc_only", "")

    def allocator(self) -> Allocator | None:
        """Returns the allocator of movable memory; None if any memory will do.

        Its `alloc` gives addresses of zeroed memory, 0 for none.
        """
        is_shared = self._config.topology == "shared"
        return self._module.MooncakeHostMemAllocator() if is_shared else None

    def put_config(self, *, is_pinned: bool) -> object:
        """Returns the library's description of how to keep values; pinned ones are not evicted."""
        config = self._module.ReplicateConfig()
        config.with_hard_pin = is_pinned
        if self._config.prefer:
            config.preferred_segment = self._config.prefer
        if hasattr(config, "data_type"):
            config.data_type = self._module.ObjectDataType.KVCACHE
        return config

    def _set_up(self, segment: int, buffer: int, protocol: str, devices: str) -> Raw | int:
        config, raw = self._config, self._module.MooncakeDistributedStore()
        given = (self._hostname, config.metadata, segment, buffer, protocol, devices, config.master)
        keywords: dict[str, str | bool] = {}
        if config.tenant != "default":
            keywords["tenant_id"] = config.tenant
        if segment and config.ssd_path:
            keywords |= {"enable_ssd_offload": True, "ssd_offload_path": config.ssd_path}
        try:
            code = int(raw.setup(*given, **keywords))
        except TypeError:
            log.warning("this release of Mooncake ignores %s", ", ".join(keywords))
            code = int(raw.setup(*given))
        return code or raw


def check_installed() -> None:
    """Raises MissingExtra if there is no such package. Imports nothing."""
    if importlib.util.find_spec("mooncake") is None:
        raise MissingExtra(_MISSING)


def _load() -> ModuleType:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MissingExtra(_MISSING) from error
    except ImportError as error:  # a shared library that it needs
        remedy = f"if this machine has no GPU, install the other one: {_INSTALL}"
        if any(name in str(error) for name in ("libibverbs", "libcurl", "libnuma")):
            remedy = "as root: apt-get install libibverbs1 libcurl4 libnuma1"
        raise MissingExtra(f"Mooncake's library cannot be loaded ({error}); {remedy}") from error


def _address_towards(master: str) -> str:
    """Returns this host's address towards the master; sends nothing."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError, TypeError):  # several masters, or a name that nobody knows
        return "127.0.0.1" if "://" not in master else socket.gethostname()
