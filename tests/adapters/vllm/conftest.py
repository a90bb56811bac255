"""One P and one D for most tests, over a redis that can be stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapters.vllm.asking import assert_idle
from tests.adapters.vllm.servers import Launcher, Server
from tests.support.instances import store as store
from tests.support.kv import Instance, settings_of
from tests.support.mooncake_cluster import Cluster, wait_until_it_serves
from tests.support.otlp_receiver import OTLPReceiver, receiving
from tests.support.redis_gate import Gate
from tests.support.redis_server import RedisServer

HERE = Path(__file__).parent
TIMEOUT_S = 400  # the first test starts the servers
TRACES = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # vLLM's own spans too
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}
CACHING = ("--enable-prefix-caching", "--enable-prompt-tokens-details")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*"]  # `-m vllm` finds nothing then, and says so
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.core  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def switched_on(store: str, role: str = "both") -> dict[str, str]:
    """The environment of an instance that hands KV over."""
    return {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": store, "PDSTORE_ROLE": role}


@dataclass
class Pair:
    """P and D, the relaying proxy in front of them, and their pool, each behind its gate.

    receiver: of their spans.
    """

    p: Server
    d: Server
    proxy: Server
    redis: RedisServer
    p_gate: Gate
    d_gate: Gate
    receiver: OTLPReceiver


@pytest.fixture
def instance(store, closed_after):
    """The two halves of pdstore on a store, without vLLM."""
    return closed_after(Instance(store))


@pytest.fixture
def worker(instance):
    """A worker that has begun with the instance's pool."""
    from pdstore.adapters.vllm.worker import PDStoreConnectorWorker
    from tests.adapters.vllm.standins import GROUP, vllm_config

    cache = SimpleNamespace(kv_cache_groups=[GROUP], num_blocks=64)
    metrics = instance.pool.metrics
    worker = PDStoreConnectorWorker(settings_of(), vllm_config(), cache, metrics)
    worker.use_pool(instance.pool)
    return worker


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Makes a tiny checkpoint of a kind, once: `checkpoints("llama")`."""
    from tests.support.vllm_checkpoints import make_tiny

    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, seed: int = 0) -> Path:
        """The last part of its path is the same whatever the seed."""
        if (kind, seed) not in made:
            made[kind, seed] = make_tiny(kind, tmp_path_factory.mktemp("seed") / kind, seed)
        return made[kind, seed]

    return make


@pytest.fixture(scope="session")
def launcher(tmp_path_factory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("servers"))
    yield launcher
    launcher.close()
    for server in launcher.servers:
        assert "after an illegal call" not in server.log.read_text(errors="replace"), server.log


@pytest.fixture(scope="session")
def started_pair(launcher, checkpoints, tmp_path_factory) -> Iterator[Pair]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    gates = Gate(redis.port), Gate(redis.port)
    model = checkpoints("llama")
    with receiving() as receiver:
        seen = TRACES | {
            "PDSTORE_TRACES": receiver.url,
            "PDSTORE_STATUS_PORT": "0",
            "PDSTORE_SELFTEST": "1",
        }
        options = (*CACHING, "--otlp-traces-endpoint", f"{receiver.url}/v1/traces")
        p, d = (
            launcher.vllm(role[0], model, *options, env=switched_on(gate.url, role) | seen)
            for gate, role in zip(gates, ("prefill", "decode"), strict=True)
        )
        proxy = launcher.proxy(p, d)
        instances = p.wait_ready(), d.wait_ready(), proxy.wait_ready()
        yield Pair(*instances, redis, *gates, receiver)
        for gate in gates:
            gate.close()
        for server in (proxy, p, d):
            server.stop()
        redis.stop()


@pytest.fixture
def mooncake(tmp_path) -> Iterator[Cluster]:
    """A real Mooncake for one test."""
    with contextlib.closing(Cluster(tmp_path)) as cluster:
        with cluster.open() as store:
            wait_until_it_serves(store)
        yield cluster


SCHEMES = ["file", "shm", "redis", pytest.param("mooncake", marks=pytest.mark.mooncake)]


def pool_url(request: pytest.FixtureRequest, scheme: str, directory: Path) -> str:
    """Returns the URL of a pool of each kind, in a directory or on a server that a fixture runs."""
    if scheme == "redis":
        return request.getfixturevalue("started_pair").redis.url
    if scheme == "mooncake":
        return request.getfixturevalue("mooncake").url
    return {
        "file": f"file://{directory}/pool",
        "shm": f"shm://pool?size=64MiB&dir={directory}",
    }[scheme]


@pytest.fixture
def pair(started_pair) -> Iterator[Pair]:
    """The pair; after each test it is idle, and so it must be."""
    yield started_pair
    for gate in (started_pair.p_gate, started_pair.d_gate):
        gate.release()
    if started_pair.redis.process is None:
        started_pair.redis.start()
    started_pair.redis.resume()
    for server in (started_pair.p, started_pair.d):
        assert server.is_alive()
        assert_idle(server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Shows the ends of the servers' logs beside a failure."""
    report = yield
    launcher = getattr(item, "funcargs", {}).get("launcher")
    if report.failed and launcher is not None:
        report.sections.append(("servers", launcher.tails()))
    return report
