"""Markers in a server that is full to its last byte: what redis and Mooncake do with them."""

from __future__ import annotations

import contextlib
import secrets

import pytest

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import assert_stored, contents, put
from tests.support.kv import eventually
from tests.support.mooncake_cluster import Cluster, wait_until_it_serves
from tests.support.redis_store import opened, small_server

SIZES = (1 << 20, 64 << 10, 16 << 10, 4 << 10, 1 << 10, 256, 64)
MOST = 400  # of each size: a server that evicts takes them all


def fill_to_the_last_byte(store, sizes=SIZES) -> list[BlockKey]:
    """Puts and leases smaller and smaller values until not even the smallest finds room."""
    leased = []
    for size in sizes:
        with contextlib.suppress(StoreFull):
            for key in fresh_keys(MOST if size < SIZES[0] else 32):
                put(store, [key], [content(key, size)])
                store.match([key])
                leased.append(key)
    return leased


def fresh_markers(count: int) -> list[BlockKey]:
    stem = f"pds1:{secrets.token_hex(16)}:handoff"
    return [BlockKey(f"{stem}:{number:032x}:0:failed") for number in range(count)]


def assert_refused(store, markers, leased) -> None:
    for marker in markers:
        leased += fill_to_the_last_byte(store, SIZES[-1:])  # a redis may free a buffer meanwhile
        with pytest.raises(StoreFull):
            put(store, [marker], [content(marker, 64)])
    assert not any(store.match([marker]) for marker in markers)
    assert all(store.match([key]) for key in leased), "a refused marker costs nothing"


@pytest.mark.redis
def test_a_redis_that_does_not_evict_refuses_markers_and_takes_them_when_there_is_room(
    redis_server,
):
    with opened(small_server(redis_server, "noeviction").url) as store:
        leased, markers = fill_to_the_last_byte(store), fresh_markers(5)
        assert_refused(store, markers, leased)
        store.remove(leased[:1])
        assert put(store, markers, contents(markers, 64)) == 5


@pytest.mark.redis
@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru"])
def test_a_redis_that_evicts_takes_markers(redis_server, policy):
    server = small_server(redis_server, policy)
    with opened(server.url) as store, server.client() as client:
        client.config_set("maxmemory-samples", 64)  # of 5, all may be markers
        markers, blocks = fresh_markers(40), fill_to_the_last_byte(store)
        # redis counts whole seconds: in the same one, markers are no younger than blocks
        eventually(lambda: 0 not in [client.object("idletime", key) for key in client.scan_iter()])
        assert put(store, markers, contents(markers, 64)) == 40
        assert_stored(store, markers, contents(markers, 64))
        assert 0 < sum(store.match([key]) for key in blocks) < len(blocks)


@pytest.mark.mooncake
def test_a_mooncake_whose_values_are_leased_refuses_markers(tmp_path):
    """Until a lease ends: then its master evicts, for a marker as for a block."""
    flags = ["--eviction_high_watermark_ratio=0.95", "--default_kv_lease_ttl=60000"]
    with (
        contextlib.closing(Cluster(tmp_path, segment=16 << 20, flags=flags)) as cluster,
        cluster.open() as store,
    ):
        wait_until_it_serves(store)
        leased, markers = fill_to_the_last_byte(store), fresh_markers(5)
        assert_refused(store, markers, leased)
