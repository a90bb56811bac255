"""Adapters for the tests of pdstore_lmcache, closed at their end, and pdstore's own redis."""

from __future__ import annotations

import contextlib

import pytest

from tests.conftest import redis_url as redis_url


@pytest.fixture
def open_adapter(tmp_path):
    """Opens adapters: `open_adapter(store=...)`; over a pool in files, if not told otherwise."""
    from lmcache_server import Adapter

    with contextlib.ExitStack() as stack:

        def open_adapter(**params) -> Adapter:
            params = {"store": f"file://{tmp_path}/pool", **params}
            return stack.enter_context(contextlib.closing(Adapter(**params)))

        yield open_adapter
