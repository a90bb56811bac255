"""Redis for tests: the one at TEST_REDIS_URL, a container, or a server of our own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer


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
