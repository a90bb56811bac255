"""Tests for stores, shipped so that other packages can run them: `StoreTests` and its tools."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(f"{__name__}.suite", f"{__name__}.values")

from pdstore.testing.faulty import Faulty  # noqa: E402
from pdstore.testing.suite import StoreTests  # noqa: E402
from pdstore.testing.values import content, fresh_keys  # noqa: E402

__all__ = ["Faulty", "StoreTests", "content", "fresh_keys"]
