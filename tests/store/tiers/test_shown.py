"""What metrics tell of each tier: its calls, bytes, copies and room, under a name of no secret."""

from __future__ import annotations

import secrets

import pytest

from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import PromptKeys
from pdstore.metrics import METRICS, CallMetrics, Metrics, TierState
from pdstore.settings import read_settings
from pdstore.store.connect import RoomWatch, connect_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import tier_name, tier_states_of
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import get, put
from tests.store.tiers.conftest import copies_of, held
from tests.support.command import PAYLOAD, namespace_of, save
from tests.support.kv import eventually
from tests.support.seal_key import write_seal_key

SIZE = HEADER_BYTES + PAYLOAD
BELOW = "1 file"


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def urls(tmp_path):
    return f"memory://{secrets.token_hex(4)} file://{tmp_path}/below?budget=1GiB"


@pytest.fixture
def connect(metrics, closed_after):
    def connect(urls, **changes):
        return closed_after(connect_store(read_settings(store=urls, **changes), metrics))

    return connect


@pytest.fixture
def blocks():
    """The keys of a prompt of three blocks, and of no tail."""
    return PromptKeys(namespace_of("shown")).extend(range(48))


def value(metrics, name, tier=BELOW, **labels):
    return metrics.registry.get_sample_value(f"pdstore_tier_{name}", {"tier": tier, **labels})


def shown_tiers(metrics):
    """Returns for each name of a tier which of its samples are shown."""
    shown = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if "tier" in sample.labels:
                shown.setdefault(sample.labels["tier"], set()).add(sample.name)
    return shown


def test_calls_bytes_and_copies_of_a_lower_tier_are_counted_under_its_name(
    connect, metrics, urls, blocks
):
    store = connect(urls)
    keys = blocks.store_keys(blocks.namespace.parts)
    assert value(metrics, "calls_total", verb="put", outcome="ok") == 0
    save(store, blocks)
    eventually(lambda: value(metrics, "copies_total", outcome="copied") == 3)
    assert value(metrics, "bytes_total", direction="save") == 3 * SIZE
    puts = value(metrics, "calls_total", verb="put", outcome="ok")
    assert puts == value(metrics, "seconds_count", verb="put") > 0
    eventually(lambda: value(metrics, "waiting_bytes") == 0)
    assert value(metrics, "bytes_total", direction="load") == 0
    assert value(metrics, "out") == 0
    first = connect(urls.partition(" ")[0])
    first.remove(keys)
    assert len(get(store, keys, [SIZE] * 3)) == 3
    assert value(metrics, "bytes_total", direction="load") == 3 * SIZE
    assert set(shown_tiers(metrics)) == {BELOW, "0 memory"}


def test_a_pool_of_one_store_shows_no_tier_and_its_codes_no_copies(connect, metrics, urls):
    connect(urls.partition(" ")[0])
    assert shown_tiers(metrics) == {}
    assert connect(urls).codes() == {}


def test_every_metric_of_a_tier_is_there_before_anything_is_counted(
    connect, metrics, urls, closed_after
):
    store = connect(urls)
    closed_after(RoomWatch(store, metrics, interval_s=0.01))
    of_rooms = {f"pdstore_tier_{name}" for name in ("used_bytes", "capacity_bytes")}
    of_rooms.add("pdstore_tier_evictions_total")
    wanted = {metric.shown_name for name, metric in METRICS.items() if name.startswith("tier_")} - {
        "pdstore_tier_seconds",
        "pdstore_tier_tokens_total",
    }
    shown = shown_tiers(metrics)
    assert wanted <= shown[BELOW]
    assert of_rooms <= shown["0 memory"]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_room_of_each_tier_is_shown(
    connect, metrics, urls, blocks, tmp_path, closed_after, is_sealed
):
    changes = {"seal_key_file": write_seal_key(tmp_path / "key")} if is_sealed else {}
    store = connect(urls, **changes)
    closed_after(RoomWatch(store, metrics, interval_s=0.01))
    save(store, blocks)
    eventually(lambda: (value(metrics, "used_bytes") or 0) >= 3 * SIZE)
    eventually(lambda: (value(metrics, "used_bytes", "0 memory") or 0) >= 3 * SIZE)
    assert value(metrics, "capacity_bytes") == 1 << 30
    assert [tier.name for tier in tier_states_of(store)] == ["0 memory", BELOW]


def test_a_tier_that_hangs_is_out_and_its_room_stops_no_other(metrics, open_tiers, closed_after):
    class HangsToo(WrapperStore):
        """Its room hangs as its calls do."""

        def room(self):
            self.wrapped.match(fresh_keys(1))
            return self.wrapped.wrapped.room()

    below = Faulty(MemoryStore("memory://below"))
    store = open_tiers(MemoryStore("memory://above"), HangsToo(below))
    metrics.add_tiers(lambda: tier_states_of(store))
    keys = fresh_keys(2)
    with held(below):
        closed_after(RoomWatch(store, metrics, interval_s=0.01))
        assert store.match(fresh_keys(1)) == 0
        assert value(metrics, "out", "1 memory") == 1
        put(store, keys, [content(key, SIZE) for key in keys])
        assert value(metrics, "waiting_bytes", "1 memory") == 2 * SIZE
        used = "pdstore_store_used_bytes"
        eventually(lambda: metrics.registry.get_sample_value(used) >= 2 * SIZE)
        assert "takes too long" in tier_states_of(store)[1].problem
    eventually(lambda: value(metrics, "out", "1 memory") == 0, 5)
    eventually(lambda: copies_of(store) == {"copied": 2}, 10)
    assert value(metrics, "waiting_bytes", "1 memory") == 0


def test_several_stores_of_one_process_are_added_up(metrics):
    states = [
        TierState("1 file", "file:///a", "it hangs", 5, {"copied": 3}),
        TierState("1 file", "file:///a", None, 7, {"copied": 4, "lost": 1}),
    ]
    for number in range(2):
        metrics.add_tiers(lambda number=number: [TierState("0 shm", "shm://a"), states[number]])
    assert (value(metrics, "out"), value(metrics, "waiting_bytes")) == (1, 12)
    assert value(metrics, "copies_total", outcome="copied") == 7
    assert value(metrics, "copies_total", outcome="lost") == 1
    states[0] = states[0]._replace(problem=None, copies={"copied": 6})
    assert value(metrics, "out") == 0
    assert value(metrics, "copies_total", outcome="copied") == 10
    assert set(shown_tiers(metrics)) == {BELOW}


def test_failed_calls_of_a_tier_are_counted_by_their_error(metrics, open_tiers):
    below = Faulty(MemoryStore("memory://below"), error_rate=1.0)
    store = open_tiers(MemoryStore("memory://above"), below)
    store.lower[0].store.count_in(CallMetrics(metrics, "1 memory"))
    store.match(fresh_keys(1))
    failed = value(metrics, "calls_total", "1 memory", verb="match", outcome="StoreUnavailable")
    assert failed > 0
    assert value(metrics, "calls_total", "1 memory", verb="match", outcome="ok") == 0


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("redis://me:***@there/0", "2 redis"),
        ("faulty+file:///tmp/a", "2 faulty+file"),
        ("a store of another package", "2 store"),
    ],
)
def test_a_tiers_name_is_its_number_and_its_scheme(label, name):
    assert tier_name(2, MemoryStore(label)) == name
