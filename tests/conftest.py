"""Fixtures of tests in several folders: redis servers, and engines on random checkpoints."""

from __future__ import annotations

import contextlib
import gc
import logging
import os

import pytest

from tests.support.redis_server import RedisServer
from tests.support.secret import SecretSearch


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


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    """The URL of a redis that all tests share: TEST_REDIS_URL, or a server of their own."""
    if given := os.environ.get("TEST_REDIS_URL"):
        yield given
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


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
