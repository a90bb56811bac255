"""Fixtures: a store in memory, and instances of both halves over it."""

from __future__ import annotations

import pytest

from pdstore.store import open_store
from tests.support.kv import Instance, settings_of


@pytest.fixture
def store(closed_after):
    return closed_after(open_store("memory://", settings_of()))


@pytest.fixture
def instance(store, closed_after):
    def instance(fill=None, over=None, **changes) -> Instance:
        return closed_after(Instance(over or store, fill, **changes))

    return instance
