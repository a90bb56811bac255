"""Fixtures: a store in memory, and instances of both halves over it."""

from __future__ import annotations

import pytest

from pdstore.scheduler import prefix_cache
from pdstore.scheduler.renewal import Renewals
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


@pytest.fixture
def num_renewed(monkeypatch):
    """Returns how many lookups are renewed, of all managers that a test makes."""
    made: list[Renewals] = []

    class Listed(Renewals):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(prefix_cache, "Renewals", Listed)
    return lambda: sum(map(len, made))
