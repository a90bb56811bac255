"""A store that hangs: each client waits for it once, and it is used as soon as it is back.

The waits are those that the request records of P and D tell.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.support.hung_store import Traffic


@contextlib.contextmanager
def paused(server):
    server.pause()
    try:
        yield
    finally:
        server.resume()


@pytest.mark.redis
def test_a_redis_that_hangs_costs_each_client_one_wait(open_engine, redis_server):
    server = redis_server()
    traffic = Traffic(open_engine, f"{server.url}?timeout=2")
    traffic.assert_each_client_waits_once(2, paused(server))


@pytest.mark.nightly
@pytest.mark.redis
@pytest.mark.parametrize("num_clients", [1, 2, 8])
def test_a_redis_with_the_usual_time_limit_costs_each_client_one_wait(
    open_engine, redis_server, num_clients
):
    server = redis_server()
    traffic = Traffic(open_engine, server.url)
    for _ in range(2):  # what the first outage left behind must not matter in the second
        traffic.assert_each_client_waits_once(num_clients, paused(server))


@pytest.mark.nightly
@pytest.mark.mooncake
@pytest.mark.parametrize("num_clients", [1, 2, 8])
def test_a_mooncake_master_that_hangs_costs_each_client_one_wait(
    open_engine, tmp_path, num_clients
):
    from tests.support.mooncake_cluster import Cluster, stopped

    with contextlib.closing(Cluster(tmp_path)) as cluster:
        traffic = Traffic(open_engine, cluster.url)
        traffic.assert_each_client_waits_once(num_clients, stopped(cluster.master))
