"""Pairs of engines on one pool, and the event loop of async tests."""

from __future__ import annotations

import itertools

import pytest

from examples.make_checkpoint import make_checkpoint
from tests.support.mini_engine_kit import pd_of

_numbers = itertools.count()


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the router does."""
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A trained checkpoint, though hardly."""
    return make_checkpoint(tmp_path_factory.mktemp("trained") / "tiny", steps=12)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return f"memory://mini{next(_numbers)}" if request.param == "memory" else f"file://{tmp_path}"


@pytest.fixture
def open_instance(open_engine, url):
    """Makes P and D engines on one pool."""

    def open_one(role, shape="llama", *, wait_s=5.0, pd=None, **options):
        settings = {"handoff_wait_s": wait_s, "drain_s": 5.0, "layer_ranges": 1} | (pd or {})
        return open_engine(shape, pd_of(role, url, **settings), **options)

    return open_one
