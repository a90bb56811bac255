"""PDStoreL2Adapter as LMCache's own loader and storage manager use it, over real stores."""

from __future__ import annotations

import contextlib

import pytest
import torch

import lmcache_server as kit
from pdstore.errors import Reason
from tests.support.engine_pools import files_of
from tests.support.engine_pools import store_url as store_url
from tests.support.kv import eventually

# isort: split
from pdstore_lmcache.l2_adapter import process_metrics

KEYS = kit.chunk_keys(5)


def content(memory) -> bytes:
    return bytes(memory.byte_array)


def objects(*fills: int, **kind):
    return [kit.memory(fill, **kind) for fill in fills]


def count_of(name: str, reason: Reason) -> float:
    metrics = process_metrics()
    return metrics.registry.get_sample_value(f"pdstore_{name}_total", {"reason": reason.value})


@pytest.mark.redis
def test_lmcaches_own_storage_manager_stores_and_prefetches(redis_url, tmp_path):
    store = {"store": redis_url, "salt": str(tmp_path)}
    with contextlib.closing(kit.Server(**store)) as p:
        stored = p.store(KEYS)
        with contextlib.closing(kit.Server(**store)) as d:
            assert d.prefetch([*KEYS, *kit.chunk_keys(2, "another")]) == [stored]


def test_chunks_reach_another_server_through_every_store(open_adapter, store_url, tmp_path):
    p, d = (open_adapter(store=store_url, salt=str(tmp_path)) for _ in range(2))
    assert p.store(KEYS, objects(1, 2, 3, 4, 5))
    asked = [*kit.chunk_keys(1, "another"), *KEYS]
    assert d.find(asked) == [1, 2, 3, 4, 5]
    loaded = objects(10, 11, 12, 13, 14, 15)
    assert d.load(asked, loaded) == [1, 2, 3, 4, 5]
    assert [set(content(memory)) for memory in loaded] == [{10}, {1}, {2}, {3}, {4}, {5}]
    used = p.adapter.get_usage().total_bytes_used
    p.adapter.delete(KEYS[:2])
    assert d.find(KEYS) == [2, 3, 4]
    assert p.adapter.get_usage().total_bytes_used == used * 3 // 5
    ranks = [kit.chunk_keys(3, "of two ranks", kv_rank=rank) for rank in (1, 2)]
    assert p.store([*ranks[0][:1], *ranks[1][:2]], objects(1, 2, 3))
    assert d.find([*ranks[0], *ranks[1]]) == [0, 3, 4], "each up to its own end"
    assert d.load([*ranks[0], *ranks[1]], objects(*range(6))) == [0, 3, 4]


@pytest.mark.parametrize("damage", ["flip", "swap", "truncate"])
def test_a_damaged_chunk_is_a_miss_that_the_next_store_heals(open_adapter, tmp_path, damage):
    adapter = open_adapter()
    assert adapter.store(KEYS, objects(1, 2, 3, 4, 5))
    first, second, *_ = files_of(tmp_path / "pool")
    value = bytearray(first.read_bytes())
    value[-1] ^= 1
    changed = {"flip": value, "swap": second.read_bytes(), "truncate": value[:-1]}[damage]
    first.write_bytes(changed)
    before = objects(10, 11, 12, 13, 14)
    loaded = adapter.load(KEYS, before)
    assert len(loaded) == 4
    for number, memory in enumerate(before):
        expected = number + 1 if number in loaded else number + 10
        assert set(content(memory)) == {expected}
    assert adapter.find(KEYS) == loaded
    assert adapter.store(KEYS, objects(1, 2, 3, 4, 5))
    assert adapter.load(KEYS, objects(0, 0, 0, 0, 0)) == [0, 1, 2, 3, 4]


def test_other_weights_tenants_models_and_kinds_of_kv_find_nothing(open_adapter):
    adapter = open_adapter()
    adapter.store(KEYS, objects(1, 2, 3, 4, 5))
    assert adapter.find(KEYS) == [0, 1, 2, 3, 4]
    others = [
        open_adapter(weights="w2").find(KEYS),
        open_adapter(salt="another tenant").find(KEYS),
        open_adapter(kv_cache_dtype="fp8_e5m2").find(KEYS),
        adapter.find(KEYS, kit.layout(torch.bfloat16)),
        adapter.find(KEYS, kit.layout(shape=(2, 3, 32, 16))),
        adapter.find(kit.chunk_keys(5, model_name="org/other")),
        adapter.find(kit.chunk_keys(5, cache_salt="user")),
        adapter.find(kit.chunk_keys(5, kv_rank=7)),
        adapter.find(kit.chunk_keys(5, object_group_id=1), kit.layout()),
    ]
    assert others == [[]] * len(others)


def test_a_chunk_that_lmcache_has_compressed_is_not_stored(open_adapter):
    adapter = open_adapter()
    compressed = kit.memory(1)
    compressed.set_used_size(100)
    assert not adapter.store(KEYS[:1], [compressed])
    assert adapter.find(KEYS[:1]) == []


@pytest.mark.parametrize("more", [{"publish": False}, {"role": "decode", "save_decoded": False}])
def test_an_instance_that_does_not_save_loads_all_the_same(open_adapter, more):
    p, d = open_adapter(), open_adapter(**more)
    assert not d.store(KEYS[:1], objects(1))
    assert p.find(KEYS) == []
    p.store(KEYS[:1], objects(1))
    assert d.load(KEYS[:1], objects(0)) == [0]


def test_a_dead_store_is_a_miss_and_the_reason_is_counted(open_adapter):
    down = Reason.STORE_DOWN
    before = count_of("misses", down), count_of("drops", down)
    adapter = open_adapter(store="redis://127.0.0.1:1/0")
    assert adapter.find(KEYS) == []
    assert adapter.load(KEYS[:1], objects(0)) == []
    assert not adapter.store(KEYS[:1], objects(1))
    eventually(lambda: count_of("misses", down) == before[0] + 2)
    eventually(lambda: count_of("drops", down) == before[1] + 1)


def test_a_result_is_told_once_and_after_the_end_none(open_adapter):
    adapter = open_adapter()
    number = adapter.adapter.submit_load_task(KEYS[:1], objects(0))
    eventually(lambda: adapter.adapter.query_load_result(number))
    assert adapter.adapter.query_load_result(number) is None  # each result is told once
    descriptors = {
        adapter.adapter.get_store_event_fd(),
        adapter.adapter.get_lookup_and_lock_event_fd(),
        adapter.adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3  # LMCache tells adapters and calls apart by them
    adapter.close()
    adapter.close()
    number = adapter.adapter.submit_load_task(KEYS[:1], objects(0))
    assert adapter.adapter.query_load_result(number) is None
