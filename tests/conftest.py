"""Redis for tests: the one at TEST_REDIS_URL, a container, or a server of our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import redis


class RedisServer:
    """A redis-server process of ours, on a free port and a unix socket, keeping nothing on disk."""

    def __init__(self, directory: Path, *options: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail(
                "these tests need a redis: `apt-get install redis-server`, start Docker,"
                " or set TEST_REDIS_URL=redis://..."
            )
        self.binary, self.directory, self.options = binary, directory, options
        self.port = free_port()
        self.socket = str(directory / "redis.sock")
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        port = [] if "--tls-port" in self.options else ["--port", str(self.port)]
        self.process = subprocess.Popen(
            [
                *(self.binary, *port, "--bind", "127.0.0.1", "--unixsocket", self.socket),
                *("--dir", str(self.directory), "--logfile", "redis.log", "--save", ""),
                *("--appendonly", "no", *self.options),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._num_starts += 1
        log, deadline = self.directory / "redis.log", time.monotonic() + 10
        while not log.exists() or log.read_text().count("Ready to accept") < self._num_starts:
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.005)

    def stop(self) -> None:
        """Ends the server at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def pause(self) -> None:
        """From now on the server accepts connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **kwargs) -> contextlib.closing[redis.Redis]:
        return contextlib.closing(redis.Redis(unix_socket_path=self.socket, **kwargs))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    """A redis that all tests share."""
    with contextlib.ExitStack() as stack:
        yield (
            os.environ.get("TEST_REDIS_URL")
            or container_url(stack)
            or own_url(stack, tmp_path_factory.mktemp("redis"))
        )


@pytest.fixture
def redis_server(tmp_path_factory):
    """Servers for one test to stop, pause, configure: `redis_server("--maxmemory", "3mb")`."""
    with contextlib.ExitStack() as stack:

        def make(*options: str) -> RedisServer:
            server = RedisServer(tmp_path_factory.mktemp("redis"), *options)
            stack.callback(server.stop)
            return server

        yield make


def container_url(stack: contextlib.ExitStack) -> str | None:
    """A redis in a container, if a Docker engine answers within two seconds."""
    # asked in another process: docker's client leaves a socket open when nobody answers
    ask = [sys.executable, "-c", "import docker; docker.from_env(timeout=2).ping()"]
    if subprocess.run(ask, capture_output=True, timeout=60).returncode:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from testcontainers.redis import RedisContainer

        container = stack.enter_context(RedisContainer("redis:7-alpine"))
    return f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"


def own_url(stack: contextlib.ExitStack, directory: Path) -> str:
    server = RedisServer(directory)
    stack.callback(server.stop)
    return server.url
