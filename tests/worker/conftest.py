"""Stores, instances of both halves over them, and the native library."""

from __future__ import annotations

import pytest

from pdstore.store import open_store
from tests.support.kv import POISON, Instance, settings_of
from tests.support.native_kit import library as library
from tests.support.native_kit import mended as mended


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


@pytest.fixture
def p(instance):
    return instance()


@pytest.fixture
def d(instance):
    return instance(fill=POISON)
