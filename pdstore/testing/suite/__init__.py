"""StoreTests: the Store contract as tests, for pdstore's stores and for any other."""

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

    Keys are new in every test, so other tests may use the same pool. A subclass may also have:

    - fixture `peer(self, store)`: a second store on the same pool, as another process has it;
    - fixture `small_store(self)`: a store with room for 16 to 64 values of 64 KiB, for the tests of
      eviction and leases, which are skipped without it;
    - method `write_raw(self, store, key, data)`: puts a value of any length into the pool, not by
      the store;
    - `clears_under_readers = True` for a store whose `clear` frees the memory that a `get` reads
      from, so that a value that is read during a `clear` may be anything;
    - `deadline_s`: seconds that a test may wait for anything.
    """

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("define a fixture `store` in the class of your store's tests")

    @pytest.fixture
    def peer(self, store: Store) -> Store:
        return store
