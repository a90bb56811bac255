"""Servers for the tests of the SGLang adapter, closed at their end."""

from __future__ import annotations

import pytest


@pytest.fixture
def model(tmp_path):
    """A checkpoint as far as the backend reads it."""
    from tests.support.sglang_server import checkpoint

    return checkpoint(tmp_path / "model")


@pytest.fixture
def serve(model, tmp_path, closed_after):
    """Opens ranks: `serve(pool, store=...)`; over a pool in files, if not told otherwise."""
    from tests.support.sglang_server import Server

    def serve(pool, checkpoint=model, **options) -> Server:
        options = {"store": f"file://{tmp_path}/pool", **options}
        return closed_after(Server(pool, checkpoint, **options))

    return serve
