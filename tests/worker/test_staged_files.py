"""Values of files: a share is read or written in one call of the library, or it is told why."""

from __future__ import annotations

from functools import partial

import pytest

from pdstore import JobResult, Reason
from pdstore.format.keys import Kind, kind_of
from pdstore.metrics import Metrics
from pdstore.native.library import load_library
from pdstore.store.file.store import FileStore
from pdstore.store.wrappers import GuardedStore
from tests.support.kv import BLOCK_BYTES, POISON, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save


class Spied(FileStore):
    """Files that note which calls read and write them."""

    def __init__(self, root, library):
        super().__init__(root, built=library)
        self.calls: list[str] = []

    def get_right(self, keys, slots, starts, engine):
        self.calls.append("get_right")
        return super().get_right(keys, slots, starts, engine)

    def put_sealed(self, keys, slots, starts, engine):
        self.calls.append("put_sealed")
        return super().put_sealed(keys, slots, starts, engine)

    def get(self, keys, slots):
        self.calls += ["get"] * any(kind_of(key) in (Kind.BLOCK, Kind.TAIL) for key in keys)
        return super().get(keys, slots)

    def put(self, keys, slots):
        self.calls += ["put"] * any(kind_of(key) in (Kind.BLOCK, Kind.TAIL) for key in keys)
        return super().put(keys, slots)


@pytest.fixture
def store(tmp_path, library):
    store = Spied(tmp_path / "pool", partial(load_library, settings_of(), for_gpu=False))
    yield store
    store.close()


@pytest.fixture
def pair(instance):
    shape = {"layer_ranges": 2, "range_bytes": 2 * BLOCK_BYTES, "workers": 2}
    return [instance(fill=fill, **shape) for fill in (None, POISON)]


@pytest.mark.parametrize("num_tokens", [64, 200, 320])
def test_all_values_are_read_and_verified_in_single_calls(pair, store, num_tokens):
    p, d = pair
    assert save(p, range(num_tokens)) == JobResult(num_tokens)
    assert load(d, range(num_tokens)) == JobResult(num_tokens)
    assert_loaded(p, d, num_tokens)
    assert set(store.calls) == {"put_sealed", "get_right"}


@pytest.mark.parametrize(("harm", "reason"), [("damage", Reason.CORRUPT), ("remove", Reason.LOST)])
def test_a_value_that_is_not_right_ends_the_load_there_with_its_reason(
    instance, store, tmp_path, harm, reason
):
    p, d = (instance(fill=fill) for fill in (None, POISON))
    save(p, range(320))
    found = d.cache.match(d.cache.keys(range(320)))
    third = p.cache.keys(range(320)).store_keys(p.layout.parts)[2]
    [path] = (tmp_path / "pool").glob(f"*/{third}")
    if harm == "remove":
        path.unlink()
    else:
        value = path.read_bytes()
        path.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
    result = d.pool.load(found.keys, D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, reason)
    assert_loaded(p, d, 128)
    assert not path.exists()


def test_the_first_tokens_are_left_alone(pair):
    p, d = pair
    save(p, range(320))
    job = d.pool.load(d.cache.keys(range(320)), D_BLOCKS, first_token=80)
    assert job.wait(10).num_tokens == 320
    assert_loaded(p, d, 320, first_token=80)


def test_bytes_are_counted_whichever_way_they_come(instance, store):
    metrics = Metrics()
    p = instance(over=GuardedStore(store, metrics))
    save(p, range(320))
    p.pool.load(p.cache.keys(range(320)), P_BLOCKS).wait(10)
    value = metrics.registry.get_sample_value
    saved, loaded = (value("pdstore_bytes_total", {"direction": way}) for way in ("save", "load"))
    assert saved == loaded > 5 * BLOCK_BYTES
