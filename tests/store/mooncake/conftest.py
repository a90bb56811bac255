"""A real Mooncake, and a store on doubles of its library and servers."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.mooncake_cluster import Cluster, wait_until_it_serves
from tests.support.mooncake_double import LibraryDouble, RawDouble, ServerDouble, double_store


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.closing(Cluster(tmp_path_factory.mktemp("mooncake"))) as cluster:
        with cluster.open() as store:
            wait_until_it_serves(store)
        yield cluster


@pytest.fixture
def raw():
    return RawDouble()


@pytest.fixture
def server():
    return ServerDouble()


@pytest.fixture
def open_double(raw, server):
    """Opens stores on `raw`: `open_double(lease_s=1.0)`."""
    with contextlib.ExitStack() as stack:
        stack.callback(raw.gate.set)

        def make(**fields):
            store = double_store(LibraryDouble(raw), server, **fields)
            return stack.enter_context(contextlib.closing(store))

        yield make


@pytest.fixture
def store(open_double):
    return open_double()
