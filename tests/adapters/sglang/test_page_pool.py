"""PagePool: names of pages, the page about an instance, and the end."""

from __future__ import annotations

import contextlib
import json
import urllib.request

import pytest

from pdstore.metrics import Metrics
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel
from tests.support.kv import eventually, settings_of

# isort: split
from pdstore.adapters.sglang.host_pages import HostPages
from pdstore.adapters.sglang.page_pool import PagePool
from pdstore.adapters.sglang.server import ServedModel

HASHES = kit.page_hashes(3)


@pytest.fixture
def open_pool(tmp_path):
    with contextlib.ExitStack() as stack:

        def open_pool(weights="w", **settings):
            settings = settings_of(**{"store": f"file://{tmp_path}/pool", **settings})
            pages = HostPages.of(wheel.mha_pool(), ServedModel("float16", weights, "", None), 0, 1)
            pool = PagePool(settings, pages, weights, Metrics())
            return stack.enter_context(contextlib.closing(pool))

        yield open_pool


def test_a_page_that_is_missing_ends_the_prefix(open_pool):
    pool = open_pool()
    assert pool.save([HASHES[0], HASHES[2]], [0, 2]) == 2
    assert pool.num_stored(HASHES) == 1
    assert pool.load(HASHES, [4, 5, 6]) == 1


def test_no_page_is_no_work(open_pool):
    pool = open_pool()
    assert [pool.num_stored([]), pool.load([], []), pool.save([], [])] == [0, 0, 0]


def test_names_tell_nothing_of_a_page_in_another_namespace(open_pool, tmp_path):
    """So a tenant cannot look in the other's names for a prompt that it guesses."""
    for weights in ("a", "b"):
        assert open_pool(weights).save(HASHES, [0, 1, 2]) == 3
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


def test_a_second_close_finds_nothing_to_end(open_pool):
    pool = open_pool()
    pool.close()
    pool.close()
    assert pool.num_stored(HASHES) == 0
    assert pool.load(HASHES, [0, 1, 2]) == 0
