"""A worker's half on a real pool: what it reports, and that it keeps nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore import open_store
from pdstore.adapters.vllm.messages import LoadSpec, PDStoreConnectorMetadata, Registered, SaveSpec
from pdstore.adapters.vllm.worker import PDStoreConnectorWorker
from tests.support.kv import Instance, eventually, settings_of

IDS = list(range(1, 21))


@pytest.fixture
def store():
    store = open_store("memory://", settings_of())
    yield store
    store.close()


@pytest.fixture
def instance(store):
    instance = Instance(store)
    yield instance
    instance.close()


@pytest.fixture
def half(instance):
    """As `register` leaves it, on the instance's pool."""
    cache = SimpleNamespace(kv_cache_groups=[None], num_blocks=64)
    half = PDStoreConnectorWorker(settings_of(), None, cache, instance.pool.metrics)
    half._pool = instance.pool
    half._registered = Registered(instance.namespace, 16)
    return half


def test_a_save_is_released_once_and_then_forgotten(half, instance):
    keys = instance.cache.keys(range(200))
    half.start_saves(PDStoreConnectorMetadata(saves=[SaveSpec(7, "request", keys, [IDS], 0)]))
    released = 0

    def is_forgotten():
        nonlocal released
        report = half.take_report()
        released += report.released[7] if report else 0
        return not half._saves

    eventually(is_forgotten)
    assert released == 1
    assert not half._of_request
    assert not half._told


def loaded(half, order):
    half.start_loads(PDStoreConnectorMetadata(loads=[order]))
    ended = []
    eventually(lambda: ended.extend(half.take_loaded(set())) or ended)
    assert ended == ["request"]


def test_a_load_that_brings_what_vllm_counts_on_is_no_failure(half, instance):
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    loaded(half, LoadSpec("request", keys, [IDS], 0, 200))
    assert not half.failed
    assert not half.bad_blocks


def test_a_load_that_brings_less_than_vllm_counts_on_is_a_failure(half, instance):
    keys = instance.cache.keys(range(200))
    instance.pool.save(keys, IDS).wait(10)
    loaded(half, LoadSpec("request", keys.prefix(128), [IDS[:10]], 0, 160))
    assert half.failed == {"request"}
    assert half.bad_blocks == set(IDS[8:10])


def test_a_load_without_keys_is_a_failure_of_the_blocks_behind_the_local_ones(half):
    loaded(half, LoadSpec("request", None, [IDS[:10]], 64, 160))
    assert half.failed == {"request"}
    assert half.bad_blocks == set(IDS[4:10])


def test_with_a_window_a_load_fails_whole(half, instance):
    object.__setattr__(instance.namespace, "windows", {0: 64})
    loaded(half, LoadSpec("request", None, [IDS[:10]], 64, 160))
    assert half.failed == {"request"}
    assert not half.bad_blocks, "vLLM would go on behind blocks that it has given back"
