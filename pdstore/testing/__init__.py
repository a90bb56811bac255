"""Tests for stores, shipped so that anybody's store can run them: `StoreTests` and its doubles."""

from __future__ import annotations

import pytest

_SUITES = ("values", "prefixes", "clears", "threads", "lifecycle", "pressure", "listings")
_NAMES = (*(f"suite.{suite}" for suite in _SUITES), "values")
pytest.register_assert_rewrite(*[f"{__name__}.{name}" for name in _NAMES])

from pdstore.testing.faulty import Faulty  # noqa: E402
from pdstore.testing.suite.store_tests import StoreTests  # noqa: E402
from pdstore.testing.values import content, fresh_keys  # noqa: E402
from pdstore.testing.wrong import all as wrong_stores  # noqa: E402

__all__ = ["Faulty", "StoreTests", "content", "fresh_keys", "wrong_stores"]
