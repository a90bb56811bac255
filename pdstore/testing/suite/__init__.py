"""StoreTests: the Store contract as tests, for every store, ours and others'."""

from __future__ import annotations

import pytest

from pdstore.store.base import Store
from pdstore.testing.suite.calls import CallTests, ClearTests
from pdstore.testing.suite.concurrency import ConcurrencyTests
from pdstore.testing.suite.optional import ListTests, PressureTests


class StoreTests(CallTests, ClearTests, ConcurrencyTests, PressureTests, ListTests):
    """Subclass it in a test file and say how a store is opened:

        class TestMyStore(StoreTests):
            @pytest.fixture
            def store(self, tmp_path):
                with contextlib.closing(MyStore(tmp_path)) as store:
                    yield store

    Keys are new in every test, so the pool may be one that other tests use too. More can be given:

    - fixture `peer(self, store)`: a second store on the same pool, as another process has it;
    - fixture `small_store(self)`: one with room for 16 to 64 values of 64 KiB, for the tests of
      eviction and leases, which are skipped without it;
    - method `write_raw(self, store, key, data)`: plants a value of any length behind the store;
    - `clears_under_readers = True` for a store whose `clear` frees the memory that a `get` reads
      from, so that what was read beside one may be anything;
    - `deadline_s`: how long anything may take.
    """

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("define a fixture `store` in the class of your store's tests")

    @pytest.fixture
    def peer(self, store: Store) -> Store:
        return store
