"""Fixtures: a store in memory, and instances of both halves over it."""

from __future__ import annotations

import pytest

from pdstore.store import open_store
from tests.support.kv import Instance, settings_of


@pytest.fixture
def store():
    store = open_store("memory://", settings_of())
    yield store
    store.close()


@pytest.fixture
def instance(store):
    made = []

    def instance(fill=None, over=None, **changes) -> Instance:
        made.append(Instance(over or store, fill, **changes))
        return made[-1]

    yield instance
    for one in made:
        one.close()
