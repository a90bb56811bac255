"""A store that hangs: each client waits for it once, and it is used as soon as it is back.

The waits are those that the request records of P and D tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.support.hung_store import Traffic
from tests.support.mini_engine_kit import close


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


@contextlib.contextmanager
def suspended(mount):
    """Stops the process that serves a FUSE mount: each call of a file hangs until it goes on."""
    [server] = [
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if f"{mount.at}\0" in (words := entry.read_text()) and "fuse_server" in words
    ]
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.parametrize("num_clients", [1, 2, 8])
def test_a_mount_that_hangs_costs_each_client_one_wait(open_engine, tmp_path, num_clients):
    """No call times out here: the kernel waits for as long as the file server does not answer."""
    fuse_mount = pytest.importorskip("tests.support.fuse_mount")
    with fuse_mount.mounted(tmp_path / "disk") as mount:
        traffic = Traffic(open_engine, f"file://{mount.at}/pool")
        traffic.assert_each_client_waits_once(num_clients, suspended(mount))
        for engine in (traffic.p, traffic.d):
            close(engine)  # before the mount is gone
