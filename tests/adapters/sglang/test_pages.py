"""PagePool: which host pools are served, which page a token is in, names of pages, and the end."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdstore.errors import ConfigError, LayoutError
from pdstore.metrics import Metrics
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.kv import eventually, settings_of

# isort: split
from pdstore.adapters.sglang import host_pools
from pdstore.adapters.sglang.host_pools import ServedModel
from pdstore.adapters.sglang.pages import PagePool

HASHES = kit.page_hashes(3)
SERVED = ServedModel("float16", "w", "", None)


def pages_of(pool, rank=0, size=1):
    return host_pools.pages_of({"kv": pool}, SERVED, rank, size)["kv"]


@pytest.fixture
def open_pool(tmp_path, closed_after):
    def open_pool(weights="w", metrics=None, **settings):
        settings = settings_of(**{"store": f"file://{tmp_path}/pool", **settings})
        pages = {"kv": pages_of(wheel.mha_pool())}
        return closed_after(PagePool(settings, pages, weights, metrics or Metrics()))

    return open_pool


def test_a_page_that_is_missing_ends_the_prefix(open_pool):
    pool, none = open_pool(), torch.arange(0)
    assert [pool.num_stored([]), pool.load([], none), pool.save([], none)] == [0, 0, 0]
    assert pool.save([HASHES[0], HASHES[2]], kit.indices_of([0, 2])) == 2
    assert pool.num_stored(HASHES) == 1
    assert pool.load(HASHES, kit.indices_of([4, 5, 6])) == 1
    pool.close()
    pool.close()
    assert pool.num_stored(HASHES) == 0
    assert pool.load(HASHES, kit.indices_of([0, 1, 2])) == 0


def test_a_whole_prompt_is_waited_for_batch_by_batch(open_pool):
    """From 0.5.23 on SGLang asks for all pages of a prompt at once, and loads 128 at a time."""
    hashes, metrics = kit.page_hashes(130, "long"), Metrics()
    p, d = open_pool(), open_pool(role="decode", handoff_wait_s=60, metrics=metrics)

    def num_matches():
        labels = {"verb": "match", "outcome": "ok"}
        return metrics.registry.get_sample_value("pdstore_store_calls_total", labels) or 0

    with ThreadPoolExecutor() as threads:
        asking = threads.submit(d.num_stored, hashes)
        eventually(lambda: num_matches() > 0)
        assert p.save(hashes[:1], kit.indices_of([0])) == 1
        assert asking.result(60) == 130
        before = num_matches()
        loading = threads.submit(d.load, hashes[128:], kit.indices_of([1, 2]))
        eventually(lambda: num_matches() > before)
        assert p.save(hashes[128:], kit.indices_of([3, 4])) == 2
        assert loading.result(60) == 2


def test_loaded_tokens_count_by_tier(open_pool, tmp_path):
    below, metrics = f"file://{tmp_path}/below", Metrics()
    assert open_pool(store=below).save(HASHES[:2], kit.indices_of([0, 1])) == 2
    pool = open_pool(store=f"memory://{tmp_path.name} {below}", metrics=metrics)
    assert pool.save(HASHES[2:], kit.indices_of([2])) == 1
    assert pool.load(HASHES, kit.indices_of([4, 5, 6])) == 3

    def value(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    tiers = [value("pdstore_tier_tokens_total", tier=tier) for tier in ("0 memory", "1 file")]
    assert (tiers, value("pdstore_tokens_total", verb="loaded")) == ([64, 128], 192)


def test_names_tell_nothing_of_a_page_in_another_namespace(open_pool, tmp_path):
    """So a tenant cannot look in the other's names for a prompt that it guesses."""
    for weights in ("a", "b"):
        assert open_pool(weights).save(HASHES, kit.indices_of([0, 1, 2])) == 3
    names = {path.name.rsplit(":", 1)[1] for path in (tmp_path / "pool").rglob("pds1:*:0:0:*")}
    assert len(names) == 6


def test_a_decode_server_that_finds_nothing_says_what_an_sglang_router_has_to_do(open_pool, caplog):
    assert open_pool(role="decode").num_stored(HASHES) == 0
    eventually(lambda: "has to ask that instance for each prompt first" in caplog.text)
    assert "kv_transfer_params" not in caplog.text


def test_the_status_page_is_this_ranks(open_pool):
    pool = open_pool(status_port=0)

    def status():
        with urllib.request.urlopen(f"{pool.status_url}/pdstore", timeout=10) as answer:
            return json.load(answer)

    assert status()["namespace"]["hex"] == pool.namespace.hex
    eventually(lambda: status()["pool"]["id"])


def test_a_host_pool_of_another_kind_or_layout_is_refused():
    class MambaPoolHost:
        layout = "page_first"

    with pytest.raises(ConfigError, match="MambaPoolHost"):
        pages_of(MambaPoolHost())
    pool = wheel.mla_pool()
    pool.layout = "page_first_kv_split"
    with pytest.raises(ConfigError, match="page_first_kv_split"):
        pages_of(pool)


@pytest.mark.parametrize(
    ("indices", "count"), [(torch.arange(64), 2), (torch.arange(100), 2), (torch.arange(32, 96), 1)]
)
def test_tokens_that_are_no_whole_pages_are_refused(indices, count):
    with pytest.raises(LayoutError, match=f"not {count} pages of 64"):
        pages_of(wheel.mha_pool()).numbers(indices, count)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_page_is_stored_as_the_pieces_that_lie_together_in_the_host_pool(layout):
    pages = pages_of(wheel.mha_pool(layout=layout), rank=1, size=2)
    geometry, [part] = pages.layout.geometry, pages.layout.owned_parts
    piece = geometry.caches[0]
    assert (
        len(pages.caches) == len(geometry.caches) == {"layer_first": 2 * 3, "page_first": 2}[layout]
    )
    assert piece.cell_bytes == pages.caches[0].shape[1]
    assert (piece.cell_tokens, piece.entry_cells, geometry.tables) == (64, 1, (64,))
    assert geometry.parts[part].heads == slice(0, 1)
    of_layers = dataclasses.replace(pages.layout, given=None)
    for num_tokens in (1, 64):
        assert pages.layout.payload_bytes(part, num_tokens) == of_layers.payload_bytes(part, 64)


@pytest.mark.parametrize(
    ("make", "layout", "pinned"),
    [
        (wheel.mha_pool, "layer_first", "7b202ae6ed81d56158b5741138b9ac1a"),
        (wheel.mha_pool, "page_first", "ea1eb73c3f344c1c69357325b0530fb1"),
        (wheel.mla_pool, "page_first", "911bdf19855c5af50fc2677119f5d452"),
    ],
)
def test_the_namespace_of_host_pages_is_what_it_always_was(make, layout, pinned):
    """Another digest is another namespace: what an older version has stored would not be found."""
    pages = [pages_of(make(layout=layout), rank, 2) for rank in range(2)]
    namespaces = [each.layout.namespace(settings_of(), weights="w") for each in pages]
    assert [each.hex for each in namespaces] == [pinned] * 2
