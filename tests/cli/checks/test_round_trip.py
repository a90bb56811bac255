"""RoundTrip: a right store is measured, a wrong one is told at its step."""

from __future__ import annotations

import pytest

from pdstore.cli.checks.finding import Level
from pdstore.cli.checks.round_trip import RoundTrip
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.testing import fresh_keys
from pdstore.testing.values import put


def test_a_right_store_is_measured_and_left_as_it_was(url):
    store = open_store(url, read_settings())
    before = {value.key for value in store.stored_values()}
    trip = RoundTrip(store)
    assert [finding.level for finding in trip.findings()] == [Level.OK] * 2
    assert trip.speed.match_s > 0
    assert min(trip.speed.put_bytes_per_s, trip.speed.get_bytes_per_s) > 0
    assert {value.key for value in store.stored_values()} == before
    store.close()


class Wrong(MemoryStore):
    """Does one thing wrongly."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def match(self, keys):
        return 1 if self.step == "connect" else super().match(keys)

    def get(self, keys, slots):
        return 0 if self.step == "get and verify" else super().get(keys, slots)

    def remove(self, keys):
        if self.step != "remove":
            super().remove(keys)


@pytest.mark.parametrize("step", ["connect", "get and verify", "remove"])
def test_a_wrong_store_is_told_at_its_step(step):
    [finding] = RoundTrip(Wrong(step)).findings()
    assert (finding.level, finding.subject) == (Level.BAD, step)


def test_a_store_that_takes_only_small_values_is_red():
    _, finding = RoundTrip(MemoryStore(budget=1 << 20)).findings()
    assert (finding.level, finding.subject) == (Level.BAD, "room")
    assert finding.remedy


@pytest.mark.parametrize(("mib", "said"), [(8, "do not fit"), (48, "push others' values out")])
def test_a_full_small_pool_keeps_its_values(tmp_path, mib, said):
    store = open_store(f"file://{tmp_path}/pool?budget={mib}MiB&lease=0.001", read_settings())
    keys = fresh_keys(mib - 2)
    assert put(store, keys, [bytes(1 << 20)] * len(keys)) == len(keys)
    *_, last = RoundTrip(store).findings()
    assert said in last.said
    assert store.match(keys) == len(keys)
    store.close()
