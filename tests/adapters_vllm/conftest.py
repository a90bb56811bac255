"""One P and one D for most tests, over a redis that can be stopped."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import RedisServer

from adapters_vllm.servers import Launcher, Server

HERE = Path(__file__).parent
TIMEOUT_S = 400  # the first test starts the servers

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


@dataclass
class Pair:
    """P and D, the relaying proxy in front of them, and their pool."""

    p: Server
    d: Server
    proxy: Server
    redis: RedisServer


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Makes a tiny checkpoint of a kind, once: `checkpoints("llama")`."""
    from vllm_checkpoints import make_tiny

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


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def started_pair(launcher, checkpoints, shared_redis) -> Pair:
    env = {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": shared_redis.url}
    model = checkpoints("llama")
    common = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
    p = launcher.vllm("p", model, *common, env={**env, "PDSTORE_ROLE": "prefill"})
    d = launcher.vllm("d", model, *common, env={**env, "PDSTORE_ROLE": "decode"})
    proxy = launcher.proxy(p, d)
    return Pair(p.wait_ready(), d.wait_ready(), proxy.wait_ready(), shared_redis)


@pytest.fixture
def pair(started_pair) -> Iterator[Pair]:
    """The pair, alive before and after."""
    yield started_pair
    assert started_pair.p.is_alive()
    assert started_pair.d.is_alive()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Shows the ends of the servers' logs beside a failure."""
    report = yield
    launcher = getattr(item, "funcargs", {}).get("launcher")
    if report.failed and launcher is not None:
        report.sections.append(("servers", launcher.tails()))
    return report
