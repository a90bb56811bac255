"""A Mooncake pool for the demo: a master and a process that holds the memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from examples.demo.processes import DemoError, Processes
from examples.ports import free_ports

_START_S = 20.0
_CONNECT_S = 0.5


def start_mooncake(processes: Processes, segment: str = "1GB") -> str:
    """Starts both on this host and returns the pool's URL.

    segment: memory to hold values in. Raises DemoError with what is not installed.
    """
    _check_installed()
    rpc, metrics, holder = free_ports(3)
    env = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    master = [f"--rpc_port={rpc}", "--rpc_address=127.0.0.1"]
    master += [f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"]
    _start(processes, "store", "mooncake_master", master, rpc, env)
    lender = ["--host=127.0.0.1", f"--port={holder}", f"--global_segment_size={segment}"]
    lender += [f"--master_server_address=127.0.0.1:{rpc}", "--metadata_server=P2PHANDSHAKE"]
    _start(processes, "holder", "mooncake_client", lender, holder, env)
    return f"mooncake://127.0.0.1:{rpc}"


def _start(
    processes: Processes,
    name: str,
    program: str,
    arguments: list[str],
    port: int,
    env: dict[str, str],
) -> None:
    command = [str(Path(sys.executable).parent / program), *arguments]
    processes.start(name, command, lambda: _accepts(port), env=env)
    processes.wait_ready(_START_S, lambda text: None)


def _check_installed() -> None:
    """Loads the library in another process, since the demo must not have its threads."""
    code = "from pdstore.store import open_store; from pdstore.settings import Settings; "
    code += "open_store('mooncake://127.0.0.1:1', Settings()).close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(done.stderr.strip().splitlines()[-1].partition(": ")[2])


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _CONNECT_S):
        return True
    return False
