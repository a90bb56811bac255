"""`pdstore bench`: it measures each kind of store, and leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from examples.ports import free_port
from pdstore.cli.bench.stores import bench
from tests.cli.conftest import fill
from tests.support.command import namespaces, run, run_json
from tests.support.kv import eventually
from tests.support.redis_server import make_certificate

VERBS = ["put", "get"] * 6 + ["match"]


def rates(document) -> list[float]:
    return [row[name] for row in document["rows"][:-1] for name in ("raw", "xxh3", "pdstore")]


def files_of(url: str) -> list[Path]:
    return sorted(path for path in Path(url.removeprefix("file://")).rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["file", "shm", "tiers", pytest.param("redis", marks=pytest.mark.redis)]
)
def test_every_kind_of_store_is_measured(scheme, tmp_path, request):
    arena, files = f"shm://bench?size=512MiB&dir={tmp_path}", f"file://{tmp_path}/pool?budget=1GiB"
    urls = {"file": files, "shm": arena, "tiers": f"{arena} {files}"}
    url = urls.get(scheme) or request.getfixturevalue("redis_server")().url
    document = run_json("bench", "--rounds", "1", "--store", url)
    assert [row["verb"] for row in document["rows"]] == VERBS
    assert all(rate > 0 for rate in rates(document))
    assert document["machine"]["cpus"] > 0
    assert list(tmp_path.iterdir()) == [], "a pool that was not there is not there now"


@pytest.mark.slow
@pytest.mark.redis
def test_a_redis_is_measured_by_a_user_who_may_do_what_pdstore_needs_over_tls(
    redis_server, tmp_path
):
    cert, key = make_certificate(tmp_path)
    port = str(free_port())
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
    rights = ["+get", "+set", "+exists", "+expire", "+unlink", "+scan", "+ping"]
    user = ["--user", "kv", "on", ">pw", "~pds1:*", "-@all", *rights]
    redis_server("--tls-port", port, *map(str, files), "--user", "default", "off", *user)
    url = f"rediss://kv:pw@127.0.0.1:{port}?ca={cert}"
    document = run_json("bench", "--rounds", "1", "--store", url)
    assert [row["verb"] for row in document["rows"]] == VERBS


@pytest.mark.slow
def test_a_pool_keeps_what_it_has_and_nothing_of_the_benchmark(filled_file):
    before = files_of(filled_file)
    ran = run("bench", "--rounds", "1", "--store", filled_file)
    assert ran.status == 0, ran.err
    assert "of ideal" in ran.out
    assert len(namespaces(filled_file)) == 2
    assert files_of(filled_file) == before


def test_a_pool_without_room_is_one_line(tmp_path):
    url = f"file://{tmp_path}/pool?budget=100KiB"
    ran = run("bench", "--rounds", "1", "--store", url)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == [], "nor is a pool that was too small"


def test_a_pool_that_an_instance_uses_meanwhile_stays(tmp_path, prompts):
    url = f"file://{tmp_path}/pool"

    class Using(threading.Thread):
        def run(self) -> None:
            eventually(lambda: (tmp_path / "pool").is_dir(), 30)
            fill(url, prompts)

    instance = Using()
    instance.start()
    bench(url, rounds=1)
    instance.join()
    assert len(namespaces(url)) == 2


@pytest.mark.redis
def test_a_redis_without_room_is_one_line(redis_server):
    server = redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    ran = run("bench", "--rounds", "1", "--store", server.url)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "maxmemory" in ran.err
