"""Starts vLLM servers for tests, quickly: a process that has imported vLLM forks into each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from examples.demo.processes import ROOT, tail_of
from examples.ports import free_port
from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT, TINY

VLLM = "vllm.entrypoints.cli.main"
START_S, STOP_S = 240.0, 20.0
SETTINGS = {
    "PDSTORE_STAGING": "32MiB",
    "PDSTORE_HANDOFF_WAIT_S": "4",
    "PDSTORE_DEADLINE_S": "4",
    "PDSTORE_DRAIN_S": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # its caches can be reset
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # 5 as httpx has: it may use one that is being closed
}
"""Short waits, so that tests of faults are short; long enough for a busy machine."""


@dataclass
class Server:
    """A `vllm serve`, or a proxy in front of two of them."""

    name: str
    url: str
    pid: int
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)

    def is_alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_S
        while not _is_healthy(self.url):
            assert self.is_alive(), f"{self.name} ended\n{tail_of(self.log)}"
            assert time.monotonic() < deadline, f"{self.name} is late\n{tail_of(self.log)}"
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Ends it, as an operator would."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends it and all its processes at once, as a crash would."""
        self.signal(signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Launcher:
    """Starts servers; `close` stops every one of them. Logs go to a directory."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.servers: list[Server] = []
        with (logs / "preloaded.log").open("wb") as log:
            self._preloaded = subprocess.Popen(
                [sys.executable, "-m", "tests.adapters.vllm.preloaded"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
            )
        assert self._hear() == "ready", tail_of(logs / "preloaded.log")

    def vllm(
        self, name: str, model: Path, *options: str, env: dict[str, str] | None = None
    ) -> Server:
        """Starts `vllm serve`; with options for a tiny checkpoint, `options` after them."""
        port = free_port()
        argv = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), *TINY]
        argv += ["--served-model-name", "tiny", *options]
        return self._start(name, VLLM, port, argv, _environment() | SETTINGS | (env or {}))

    def again(self, server: Server) -> Server:
        """The same once more, on a port of its own."""
        port = free_port()
        argv = list(server.argv)
        argv[argv.index("--port") + 1] = str(port)
        return self._start(server.name, VLLM, port, argv, server.env)

    def proxy(self, prefill: Server, decode: Server) -> Server:
        """The plain relaying proxy in front of two servers."""
        port = free_port()
        argv = ["--port", str(port), "--prefill", prefill.url, "--decode", decode.url]
        return self._start("proxy", "examples.plain_proxy", port, argv, _environment())

    def router(self, prefill: Server, decode: Server, *options: str) -> Server:
        """The router in front of two servers."""
        port = free_port()
        argv = ["--port", str(port), "--prefill", prefill.url, "--decode", decode.url, *options]
        return self._start("router", "pdstore.router", port, argv, _environment())

    def tails(self) -> str:
        """The ends of all servers' logs."""
        return "\n".join(tail_of(server.log) for server in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.signal(signal.SIGTERM)
        for server in self.servers:
            server.stop()
        self._preloaded.communicate(timeout=STOP_S)  # its input ends, so it does

    def _start(
        self, name: str, module: str, port: int, argv: list[str], env: dict[str, str]
    ) -> Server:
        log = self._logs / f"{len(self.servers):02}-{name}.log"
        asked = {"module": module, "argv": argv, "env": env, "log": str(log)}
        print(json.dumps(asked), file=self._preloaded.stdin, flush=True)
        server = Server(name, f"http://127.0.0.1:{port}", int(self._hear()), log, env, argv)
        self.servers.append(server)
        return server

    def _hear(self) -> str:
        assert self._preloaded.stdout is not None
        return self._preloaded.stdout.readline().strip()


def _environment() -> dict[str, str]:
    """A CPU server's, whatever pdstore is told outside."""
    outside = {name: os.environ[name] for name in os.environ if not name.startswith("PDSTORE_")}
    return {**outside, **ENVIRONMENT, **CPU_ENVIRONMENT}


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
