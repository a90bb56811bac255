"""A store offers how it moves values: wrappers see every value, composites use several ways."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest

from pdstore import JobResult
from pdstore.errors import Reason
from pdstore.format.block import HEADER_BYTES
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.store.url import StoreURL
from pdstore.testing import StoreTests
from tests.support.composed_stores import CountingStore, TwoStores
from tests.support.instances import instance as instance
from tests.support.kv import POISON, settings_of
from tests.support.native_kit import library as library
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save
from tests.support.same_arguments import SameArguments

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 200
POOL_ID_BYTES = HEADER_BYTES  # a thread gives a new pool its id


@pytest.fixture
def arena(tmp_path, library, closed_after):
    return closed_after(open_store(f"shm://test?size=64MiB&dir={tmp_path}", settings_of()))


@pytest.fixture
def files(tmp_path, library, closed_after):
    return closed_after(open_store(f"file://{tmp_path}/pool", settings_of()))


@pytest.fixture(params=["arena", "files", "memory"])
def bare(request, closed_after):
    if request.param == "memory":
        return closed_after(MemoryStore())
    return request.getfixturevalue(request.param)


@pytest.fixture
def counting(bare):
    return CountingStore(bare)


@pytest.fixture
def store(bare):
    """The store of instances that a test gives no other."""
    return bare


@pytest.fixture
def composite(arena, closed_after):
    return closed_after(TwoStores(arena, MemoryStore()))


def bytes_of(p):
    keys = p.cache.keys(range(NUM_TOKENS))
    return [
        p.layout.payload_bytes(part, keys.tokens_of(n)) + HEADER_BYTES
        for n in range(len(keys))
        for part in p.layout.parts
    ]


def test_a_wrapper_counts_all_that_is_moved_in_whatever_way(instance, counting):
    p, d = instance(over=counting), instance(over=counting, fill=POISON)
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    sizes = bytes_of(p)
    assert counting.values["put"] == counting.values["get"] == len(sizes)
    assert counting.bytes["put"] == counting.bytes["get"] == sum(sizes)


def test_wrappers_in_wrappers_all_see_the_calls(instance, bare):
    metrics, inner = Metrics(), CountingStore(bare)
    outer = CountingStore(GuardedStore(inner, metrics))
    p = instance(over=outer)
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert outer.values["put"] == inner.values["put"] == len(bytes_of(p))
    counted = metrics.registry.get_sample_value("pdstore_bytes_total", {"direction": "save"})
    assert counted - inner.bytes["put"] in (0, POOL_ID_BYTES)


def test_a_load_of_a_composite_is_partly_in_place_and_partly_staged(instance, composite, arena):
    counting = CountingStore(composite)
    p, d = instance(over=counting), instance(over=counting, fill=POISON)
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    num_in_place = sum(key.count(":") > 3 for key, *_ in arena.stored_values())
    assert 0 < num_in_place < len(bytes_of(p))
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)
    assert counting.values["put"] == counting.values["get"] == len(bytes_of(p))


def test_a_store_of_another_package_chooses_how_its_values_move(
    instance, tmp_path, monkeypatch, closed_after
):
    """The example in SQLite, where threads take turns, asks for a single worker."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "store_plugin"))
    sqlite = importlib.import_module("pdstore_sqlite").SQLiteStore
    store = closed_after(sqlite.open(StoreURL.of(f"sqlite://{tmp_path}/pool.db"), settings_of()))
    before = {thread.name for thread in threading.enumerate()}
    p, d = instance(over=store), instance(over=store, fill=POISON)
    names = [thread.name for thread in threading.enumerate() if thread.name not in before]
    assert [name for name in names if "worker" in name] == ["pdstore-worker-0"] * 2
    assert save(p, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert load(d, range(NUM_TOKENS)) == JobResult(NUM_TOKENS)
    assert_loaded(p, d, NUM_TOKENS)


def test_what_one_of_both_stores_has_lost_ends_the_load_there(instance, composite):
    p, d = instance(over=composite), instance(over=composite, fill=POISON)
    save(p, range(NUM_TOKENS))
    found = d.cache.match(d.cache.keys(range(NUM_TOKENS)))
    lost = p.layout.block_tokens * 3
    composite.remove(found.keys.store_keys(p.layout.parts, 3, 4))
    result = d.pool.load(found.keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (lost, Reason.LOST)
    assert d.tokens(D_BLOCKS)[:lost].equal(p.tokens(P_BLOCKS)[:lost])


class TestCountingStore(StoreTests):
    @pytest.fixture
    def store(self, arena):
        return CountingStore(arena)

    @pytest.fixture
    def peer(self, arena, tmp_path, closed_after):
        url = f"shm://test?dir={tmp_path}"
        return CountingStore(closed_after(open_store(url, settings_of())))


class TestComposite(SameArguments, StoreTests):
    @pytest.fixture
    def store(self, composite):
        return composite

    @pytest.fixture
    def peer(self, composite, tmp_path, closed_after):
        arena = closed_after(open_store(f"shm://test?dir={tmp_path}", settings_of()))
        return TwoStores(arena, composite.stores[0])
