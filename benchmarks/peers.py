"""Connectors of others that are measured beside pdstore: their settings, and LMCache's server."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from examples.demo.processes import Processes

LMCACHE_PORTS = (6555, 8095, 9095)
"""Of its server: of its engines, of HTTP, of Prometheus."""
PEER_MODES: dict[str, tuple[str, ...]] = {
    "nixl": ("relayed", "computed"),
    "lmcache": ("relayed", "settled", "computed"),
}
"""The ways in which a P and a D of a peer hand over. NIXL's P keeps its blocks until D has them."""

_NIXL_PORTS = {"kv_producer": 5600, "kv_consumer": 5650}

Role = Literal["kv_producer", "kv_consumer"]


class Peer(NamedTuple):
    """What one engine needs: vLLM's `kv_transfer_config`, and more of its environment."""

    transfer: dict[str, Any]
    environment: dict[str, str]


def peer_of(name: str, role: Role) -> Peer:
    """Returns the settings of P or of D: NIXL's read each other's memory, LMCache's ask a server.

    Each end of NIXL has a port at which the other asks where its memory is.
    """
    if name == "nixl":
        channel, port = "VLLM_NIXL_SIDE_CHANNEL", str(_NIXL_PORTS[role])
        environment = {f"{channel}_HOST": "127.0.0.1", f"{channel}_PORT": port}
        return Peer({"kv_connector": "NixlConnector", "kv_role": role}, environment)
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORTS[0]}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    environment = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    return Peer(transfer | {"kv_connector_extra_config": extra}, environment)


def _lmcache_server(gib: str) -> list[str]:
    """Returns the command of LMCache's server, which takes all its memory at the start."""
    port, http, prometheus = map(str, LMCACHE_PORTS)
    server = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    server += ["--port", port, "--l1-size-gb", gib, "--eviction-policy", "LRU"]
    server += ["--no-l1-use-lazy", "--supported-transfer-mode", "lmcache_driven"]
    server += ["--http-host", "127.0.0.1", "--http-port", http]
    return [*server, "--prometheus-port", prometheus]


def start_service(name: str, gib: str, processes: Processes, options: Sequence[str] = ()) -> None:
    """Starts what a peer needs beside its engines, if anything; they may start before it is ready.

    LMCache's server takes as long as an engine, which waits for it. options: more of its own.
    """
    if name == "lmcache":
        environment = {**os.environ, **peer_of(name, "kv_producer").environment}
        is_ready = partial(_listens, LMCACHE_PORTS[0])
        command = [*_lmcache_server(gib), *options]
        processes.start("lmcache-server", command, is_ready, environment)


def _listens(port: int) -> bool:
    """True if something accepts connections at this port of this host."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
