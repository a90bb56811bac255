"""The event loop of async tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the router does."""
    return "asyncio"
