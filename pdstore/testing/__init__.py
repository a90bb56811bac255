"""Tests for stores, shipped so that anybody's store can run them: `StoreTests` and its doubles."""

from __future__ import annotations

import pytest

_SUITES = ("value", "prefix", "clear", "thread", "life", "pressure")
_NAMES = (*(f"{suite}_tests" for suite in _SUITES), "values")
pytest.register_assert_rewrite(*[f"{__name__}.{name}" for name in _NAMES])

from pdstore.store.wrappers import Faulty  # noqa: E402
from pdstore.testing import wrong_stores  # noqa: E402
from pdstore.testing.store_tests import StoreTests  # noqa: E402
from pdstore.testing.values import content, fresh_keys  # noqa: E402

__all__ = ["Faulty", "StoreTests", "content", "fresh_keys", "wrong_stores"]
