"""Library: Mooncake's Python module, imported after its own variables are set."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import socket
from types import ModuleType
from typing import cast

from pdstore.environment import set_missing_variables
from pdstore.errors import MissingExtra
from pdstore.store.mooncake.client import Raw
from pdstore.store.mooncake.config import MooncakeConfig
from pdstore.store.mooncake.memory import Allocator

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

None of them affects its calls to the process that shares our memory: see `barrier`.
"""

_SYSTEM_LIBRARIES = ("libibverbs", "libcurl", "libnuma")
_INSTALL_SYSTEM = "apt-get install libibverbs1 libcurl4 libnuma1"
_INSTALL = "pip install 'pdstore[mooncake]', or without a GPU 'pdstore[mooncake-cpu]'"
_MISSING = f"mooncake:// needs Mooncake's library: {_INSTALL}"


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
        raw = self._module.MooncakeDistributedStore()
        if config.topology == "shared":
            return self._checked(raw, raw.setup_dummy(0, 0, config.client))
        segment = config.segment if is_first else 0
        code = self._set_up(raw, segment, config.buffer, config.protocol, config.devices)
        return self._checked(raw, code)

    def connect_lookup(self) -> Raw | int:
        """Returns an object that only talks to the master, or the code of its setup."""
        raw = self._module.MooncakeDistributedStore()
        return self._checked(raw, self._set_up(raw, 0, 0, "rpc_only", ""))

    def allocator(self) -> Allocator | None:
        """Returns the allocator of movable memory; None if any memory will do."""
        if self._config.topology != "shared":
            return None
        return cast(Allocator, self._module.MooncakeHostMemAllocator())

    def put_config(self, *, is_pinned: bool) -> object:
        """Returns the library's description of how to keep values; pinned ones are not evicted."""
        config = self._module.ReplicateConfig()
        config.with_hard_pin = is_pinned
        if self._config.prefer:
            config.preferred_segment = self._config.prefer
        if hasattr(config, "data_type"):
            config.data_type = self._module.ObjectDataType.KVCACHE
        return config

    def _set_up(self, raw: Raw, segment: int, buffer: int, protocol: str, devices: str) -> int:
        config, setup = self._config, raw.setup  # type: ignore[attr-defined]
        given = (self._hostname, config.metadata, segment, buffer, protocol, devices, config.master)
        keywords: dict[str, str | int] = {}
        if config.tenant != "default":
            keywords["tenant_id"] = config.tenant
        if segment and config.ssd:
            keywords |= {"enable_ssd_offload": True, "ssd_offload_path": config.ssd_path}
        if config.http and protocol != "rpc_only":
            keywords |= {"enable_client_http_server": True, "client_http_port": config.http_port}
        try:
            return int(setup(*given, **keywords))
        except TypeError:
            log.warning("this release of Mooncake ignores %s", ", ".join(keywords))
            return int(setup(*given))

    def _checked(self, raw: object, code: int) -> Raw | int:
        return cast(Raw, raw) if code == 0 else code


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
        if any(name in str(error) for name in _SYSTEM_LIBRARIES):
            raise MissingExtra(
                f"Mooncake's library cannot be loaded ({error}); as root: {_INSTALL_SYSTEM}"
            ) from error
        raise MissingExtra(
            f"Mooncake's library cannot be loaded ({error}); if this machine has no GPU, install"
            f" the other one: {_INSTALL}"
        ) from error


def _address_towards(master: str) -> str:
    """Returns this host's address towards the master; sends nothing."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError, TypeError):  # several masters, or a name that nobody knows
        return "127.0.0.1" if "://" not in master else socket.gethostname()
