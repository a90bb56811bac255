"""PDStoreHiCache as SGLang's own loader and controller use it, over real stores."""

from __future__ import annotations

import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from examples.ports import free_port
from pdstore.errors import ConfigError, Reason
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.damage import damage
from tests.support.engine_pools import files_of
from tests.support.engine_pools import store_url as store_url
from tests.support.kv import eventually

HASHES = kit.page_hashes(5)
SAVED, LOADED = [3, 1, 7, 2, 9], [8, 4, 0, 5, 6]


def count_of(server, name: str, **labels: str) -> float | None:
    return server.backend.metrics.registry.get_sample_value(f"pdstore_{name}_total", labels)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_pages_reach_another_server_through_every_store(serve, store_url, layout):
    p, d = (serve(wheel.mha_pool(layout=layout), store=store_url) for _ in range(2))
    hashes, others = kit.page_hashes(5, layout), d.page(1)
    assert p.backup(hashes, SAVED) == 5
    assert d.prefetch([*hashes, *kit.page_hashes(2, "another")], [*LOADED, 10, 11]) == 5
    assert [d.page(n) for n in LOADED] == [p.page(n) for n in SAVED]
    assert d.page(1) == others
    eventually(lambda: count_of(p, "tokens", verb="saved") == 5 * 64)
    eventually(lambda: count_of(d, "tokens", verb="loaded") == 5 * 64)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_latents_are_saved_once_for_all_ranks(serve, layout):
    ranks = [
        serve(
            wheel.mla_pool(layout=layout), config={"tp_rank": n, "tp_size": 2, "is_mla_model": True}
        )
        for n in range(2)
    ]
    assert ranks[0].backup(HASHES, SAVED) == 5
    assert ranks[1].prefetch(HASHES, LOADED) == 5
    assert [ranks[1].page(n) for n in LOADED] == [ranks[0].page(n) for n in SAVED]


@pytest.mark.parametrize("damage", ["flip", "swap", "truncate"])
def test_damaged_pages_are_misses_that_the_next_save_heals(serve, tmp_path, damage):
    p, d = serve(wheel.mha_pool()), serve(wheel.mha_pool())
    p.backup(HASHES, SAVED)
    for file, other in zip(files := files_of(tmp_path / "pool"), files[1:], strict=False):
        value = bytearray(file.read_bytes())
        value[-1] ^= 1
        file.write_bytes(
            {"flip": value, "swap": other.read_bytes(), "truncate": value[:-1]}[damage]
        )
    before = d.page(LOADED[0]), d.page(LOADED[-1])
    come = d.prefetch(HASHES, LOADED)
    assert come < 5
    assert (d.page(LOADED[0]) == before[0]) is (come == 0)
    assert d.page(LOADED[-1]) == before[1]
    p.backup(HASHES, SAVED)
    assert d.prefetch(HASHES, LOADED) == 5
    assert [d.page(n) for n in LOADED] == [p.page(n) for n in SAVED]


@pytest.mark.parametrize("scheme", ["file", "shm"])
def test_no_page_comes_from_a_pool_of_which_all_is_damaged(serve, tmp_path, scheme):
    """Flips a bit of each 4 KiB of values; holes of the file stay holes.

    Values of an arena are summed where they were copied to, in a page that SGLang then gives back.
    """
    pool = tmp_path / "damaged"
    pool.mkdir()
    url = {"file": f"file://{pool}", "shm": f"shm://p?size=64MiB&dir={pool}"}[scheme]
    p, d = serve(wheel.mha_pool(), store=url), serve(wheel.mha_pool(), store=url, role="decode")
    assert p.backup(HASHES, SAVED) == 5
    files = [file for file in pool.rglob("*") if file.is_file()]
    room, before = [file.stat().st_blocks for file in files], d.page(LOADED[0])
    assert damage(pool) >= 5
    assert [file.stat().st_blocks for file in files] == room
    assert d.prefetch(HASHES, LOADED) == 0
    assert scheme == "shm" or d.page(LOADED[0]) == before
    eventually(lambda: count_of(d, "misses", reason=Reason.CORRUPT.value) == 1)


def test_other_weights_shapes_and_dtypes_find_nothing(serve, model, tmp_path):
    serve(wheel.mha_pool()).backup(HASHES, SAVED)
    assert serve(wheel.mha_pool()).backend.batch_exists(HASHES) == 5
    others = [
        serve(wheel.mha_pool(), kit.checkpoint(tmp_path / "a", b"other weights")),
        serve(wheel.mha_pool(), kit.checkpoint(tmp_path / "b", rope_theta=5e5)),
        serve(wheel.mha_pool(), salt="another tenant"),
        serve(wheel.mha_pool(dtype=torch.bfloat16)),
        serve(wheel.mha_pool(heads=1), config={"tp_size": 2}),
        serve(wheel.mha_pool(layout="page_head")),
    ]
    assert [other.backend.batch_exists(HASHES) for other in others] == [0] * len(others)


def test_clear_forgets_this_model_and_no_other(serve, model, tmp_path):
    ours = serve(wheel.mha_pool())
    other = serve(wheel.mha_pool(), kit.checkpoint(tmp_path / "other", b"other weights"))
    assert [ours.backup(HASHES, SAVED), other.backup(HASHES, SAVED)] == [5, 5]
    ours.backend.clear()
    assert ours.backend.batch_exists(HASHES) == 0
    assert other.backend.batch_exists(HASHES) == 5


def test_a_decode_server_loads_pages_while_the_others_are_being_stored(serve, store_url):
    hashes = kit.page_hashes(5, "on its way")
    p = serve(wheel.mha_pool(), store=store_url, role="prefill")
    d = serve(wheel.mha_pool(), store=store_url, role="decode", handoff_wait_s=60)
    first = d.page(LOADED[0])
    d.wait_for("a request", hashes)
    assert p.backup(hashes[:1], SAVED[:1]) == 1
    operation = d.hit()
    assert len(operation.hash_value) == 5  # and one is stored
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(d.transfer, operation, LOADED)
        eventually(lambda: d.page(LOADED[0]) != first)
        assert p.backup(hashes[1:3], SAVED[1:3]) == 2
        assert p.backup(hashes[3:], SAVED[3:]) == 2
        assert loading.result(60) == 5
    assert [d.page(n) for n in LOADED] == [p.page(n) for n in SAVED]
    eventually(lambda: count_of(d, "tokens", verb="matched") == 5 * 64)


def test_pages_that_were_expected_and_do_not_come_are_computed(serve):
    p = serve(wheel.mha_pool(), role="prefill")
    d = serve(wheel.mha_pool(), role="decode", handoff_wait_s=60)
    last = d.page(LOADED[3])
    d.wait_for("a request", HASHES)
    p.backup(HASHES[:3], SAVED[:3])
    operation = d.hit()
    assert d.transfer(operation, LOADED) == 3
    assert d.page(LOADED[3]) == last
    assert [d.page(n) for n in LOADED[:3]] == [p.page(n) for n in SAVED[:3]]


def test_a_prompt_that_nobody_stores_holds_up_the_others_for_a_moment_only(serve):
    """SGLang asks for one prompt after the other."""
    d = serve(wheel.mha_pool(), role="decode", handoff_wait_s=60)
    serve(wheel.mha_pool()).backup(HASHES, SAVED)
    d.start()
    for request, hashes in [("lost", kit.page_hashes(5, "another")), ("stored", HASHES)]:
        d.ask(request, hashes)
    began = time.monotonic()
    assert d.found() == ("stored", 5)
    assert time.monotonic() - began < 30
    assert d.revoked() == "lost"


def test_a_dead_store_is_a_miss_and_the_reason_is_counted(serve):
    server = serve(wheel.mha_pool(), store="redis://127.0.0.1:1/0")
    assert server.prefetch(HASHES, LOADED) == 0
    assert server.backup(HASHES, SAVED) == 0
    eventually(lambda: count_of(server, "misses", reason=Reason.STORE_DOWN.value) == 1)
    eventually(lambda: count_of(server, "drops", reason=Reason.STORE_DOWN.value) == 1)


def test_an_exception_costs_a_miss_and_not_sglangs_thread(serve):
    server = serve(wheel.mha_pool())
    inside = torch.arange(5 * 64) + 1  # not at the beginning of a page
    assert server.backend.batch_set_v1(HASHES, inside) == [False] * 5
    assert server.backend.batch_get_v1(HASHES, inside) == [False] * 5
    eventually(lambda: count_of(server, "misses", reason=Reason.FAULT.value) == 2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"config": {"pp_size": 2}}, "pipeline"),
        ({"config": {"attn_cp_size": 2}}, "context parallelism of attention"),
        ({"config": {"should_split_heads": True}}, "tp_lcm_size"),
        ({"arguments": {"enable_lora": True}}, "LoRA"),
        ({"arguments": {"lora_paths": ["name=/adapters/a"]}}, "LoRA"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"arguments": {"load_format": "dummy"}}, "PDSTORE_WEIGHTS"),
        ({"url": "file://"}, "url: there is no such setting"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(serve, options, why):
    with pytest.raises(ConfigError, match=why):
        serve(wheel.mha_pool(), **options)


def test_a_pool_beside_kv_is_refused_by_name_if_it_is_not_known(serve):
    """Up to SGLang 0.5.22 each is; later versions give lengths that all of their ranks can load."""
    server = serve(wheel.mha_pool())
    names = wheel.hicache_storage.PoolName
    server.backend.register_mem_host_pool_v2(server.pool, names.KV)
    with pytest.raises(ConfigError, match=r"the pool deepseek_v4_c4.* wrong answers"):
        server.backend.register_mem_host_pool_v2(server.pool, names.DEEPSEEK_V4_C4)
    why = r"the host pool MHATokenToKVPoolHost \(mamba\)"
    if not hasattr(wheel.hicache_storage.HiCacheStorage, "on_host_pools_registered"):
        why = r"the pool mamba before SGLang 0.5.23"
    with pytest.raises(ConfigError, match=why):
        server.backend.register_mem_host_pool_v2(server.pool, names.MAMBA)


def test_data_parallel_ranks_of_one_environment_all_start(serve, monkeypatch, caplog):
    """Plain `--dp-size`, and each SGLang before 0.5.21: every rank is rank 0."""
    monkeypatch.setenv("PDSTORE_STATUS_PORT", str(port := free_port()))
    ranks = [serve(wheel.mha_pool()) for _ in range(2)]
    assert [rank.backup(kit.page_hashes(2, str(n)), [0, 1]) for n, rank in enumerate(ranks)] == [
        2
    ] * 2
    assert caplog.text.count(f"PDSTORE_STATUS_PORT={port}: ") == 1


def test_the_pages_of_data_parallel_groups_lie_beside_each_other(serve, monkeypatch, caplog):
    """From 0.5.21 on the configuration has the number of the group."""
    fields = dataclasses.fields(wheel.hicache_storage.HiCacheStorageConfig)
    if "dp_rank" not in [field.name for field in fields]:
        newer = dataclasses.make_dataclass(
            "HiCacheStorageConfig",
            [("dp_rank", int, 0)],
            bases=(wheel.hicache_storage.HiCacheStorageConfig,),
        )
        monkeypatch.setattr(wheel.hicache_storage, "HiCacheStorageConfig", newer)
    monkeypatch.setenv("PDSTORE_STATUS_PORT", str(port := free_port() - 3))
    caplog.set_level(logging.INFO, "pdstore.status.server")
    for dp_rank, tp_rank in [(0, 1), (1, 1)]:
        serve(wheel.mha_pool(), config={"tp_size": 2, "tp_rank": tp_rank, "dp_rank": dp_rank})
    places = [f"http://127.0.0.1:{port + number}" for number in (1, 3)]
    assert [place in caplog.text for place in places] == [True, True]
