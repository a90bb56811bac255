"""Pairs of engines on one pool, and the event loop of async tests."""

from __future__ import annotations

import itertools

import pytest

from examples.make_checkpoint import make_checkpoint

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
        settings = {
            "pd_transfer_via_storage": True,
            "role": role,
            "store": url,
            "staging": "8MiB",
            "handoff_wait_s": wait_s,
            "drain_s": 5.0,
            "layer_ranges": 1,
        }
        return open_engine(shape, settings | (pd or {}), **options)

    return open_one
