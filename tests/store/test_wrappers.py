"""A wrapper keeps the contract: it passes every call, and what the other store answers."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.metrics import Metrics
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import GuardedStore, WrapperStore
from pdstore.testing import StoreTests


def as_an_engine_has_it(store):
    return GuardedStore(store, Metrics())


@pytest.mark.parametrize("wrap", [WrapperStore, as_an_engine_has_it])
class TestWrappedStore(StoreTests):
    @pytest.fixture
    def store(self, wrap):
        with contextlib.closing(wrap(MemoryStore(lease_s=7.0))) as store:
            yield store

    @pytest.fixture
    def small_store(self, wrap):
        with contextlib.closing(wrap(MemoryStore(budget=24 * (64 << 10), lease_s=2.0))) as store:
            yield store

    def test_what_it_says_of_itself_is_the_other_stores(self, store):
        assert (store.label, store.lease_s) == ("memory://", 7.0)
        assert len(store.allocate(4096)) == 4096
