"""StoreTests: the Store contract as tests, for pdstore's stores and for any other."""

from __future__ import annotations

import pytest

from pdstore.store.base import Store
from pdstore.testing.suite.calls import CallTests, ClearTests
from pdstore.testing.suite.concurrency import ConcurrencyTests
from pdstore.testing.suite.optional import ListTests, PressureTests


class StoreTests(CallTests, ClearTests, ConcurrencyTests, PressureTests, ListTests):
    """A subclass in a test file tests the store that its fixture `store` opens:

        class TestMyStore(StoreTests):
            @pytest.fixture
            def store(self, tmp_path):
                with contextlib.closing(MyStore(tmp_path)) as store:
                    yield store

    Keys are new in every test, so other tests may use the same pool. A subclass may also have:

    - fixture `peer(self, store)`: a second store object on the same pool, opened separately;
    - fixture `small_store(self)`: a store with room for 16 to 64 values of 64 KiB. Without it, the
      tests of eviction and of leases are skipped;
    - method `write_raw(self, store, key, data)`: writes a value of any length into the pool without
      calling the store;
    - `clears_under_readers = True` for a store whose `clear` may free memory that a `get` is
      reading, so that this `get` may return any bytes;
    - `has_one_version = False` for a store in which two users of the pool may see the values of two
      writers of one key, each of them whole;
    - `deadline_s`: the maximum number of seconds that a test waits for threads, a value or a child.
    """

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("define a fixture `store` in the class of your store's tests")

    @pytest.fixture
    def peer(self, store: Store) -> Store:
        return store
