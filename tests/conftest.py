"""Fixtures of tests in several folders: redis servers, and engines on random checkpoints."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from pathlib import Path

import pytest

import pdstore
from pdstore.store import connect
from tests.support.redis_server import RedisServer, has_docker
from tests.support.secret import SecretSearch


def pytest_configure() -> None:
    """Refuses an environment whose editable install leads to another checkout."""
    tested, here = (Path(file).resolve().parents[1] for file in (pdstore.__file__, __file__))
    if tested != here:
        raise pytest.UsageError(
            f"these are the tests of {here}, but this environment's pdstore is that of {tested}:"
            f" run `make setup` in {here}, and its .venv"
        )


def pytest_collection_finish() -> None:
    """Freezes what was collected: each full pass of the garbage collector over it took a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_secret_in_a_log(tmp_path_factory):
    """Fails after the last test if any line of a log has a secret that a test has used."""
    search = SecretSearch()
    logging.getLogger().addHandler(search)
    yield
    logging.getLogger().removeHandler(search)
    search.search(tmp_path_factory.getbasetemp().glob("*/*.log"))
    assert not search.found


@pytest.fixture(autouse=True)
def _warnings_of_other_tests_are_forgotten():
    """Lets each test read the line that an instance logs once a minute about a store's absence."""
    connect.warned.clear()


@pytest.fixture
def closed_after():
    """Closes what it is given after the test, the last first: `store = closed_after(open_it())`."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    """The URL of a redis that all tests share.

    It is the one at TEST_REDIS_URL, else a container, else a server that the tests start.
    """
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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Random checkpoints of the mini engine, by shape."""
    from tests.support.mini_engine_kit import make_checkpoints  # imports transformers

    return make_checkpoints(tmp_path_factory.mktemp)


@pytest.fixture
def open_engine(checkpoints):
    """Makes mini engines; at the end they stop, and every block must have come back."""
    from tests.support.mini_engine_kit import opening_engines  # imports transformers

    with opening_engines(checkpoints) as open_one:
        yield open_one


def container_url(stack: contextlib.ExitStack) -> str | None:
    """The URL of a redis in a new container; None without Docker."""
    if not has_docker():
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
