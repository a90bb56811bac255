"""Pools for the command, each with two prompts of two namespaces: files, a redis, a Mooncake."""

from __future__ import annotations

import pytest

from pdstore.format.keys import PromptKeys
from pdstore.settings import read_settings
from pdstore.store import open_store
from tests.support.command import namespace_of, namespaces, save
from tests.support.mooncake_cluster import Cluster

PROMPT = range(40)  # two blocks of 16 and a tail of 8
MOONCAKE_BYTES = 1 << 30
"""Room for a prompt, which `doctor` asks for."""


@pytest.fixture(params=["file", "redis", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def url(request, tmp_path):
    if request.param == "file":
        return request.getfixturevalue("file_url")
    if request.param == "redis":
        return request.getfixturevalue("redis_server")().url
    return request.getfixturevalue("mooncake").url


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory):
    """One real Mooncake for all of these tests; what one has put there, the next one finds."""
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"), segment=MOONCAKE_BYTES)
    yield cluster
    cluster.close()


@pytest.fixture
def file_url(tmp_path):
    """An empty pool."""
    (tmp_path / "pool").mkdir()
    return f"file://{tmp_path}/pool"


@pytest.fixture
def prompts():
    """The keys of one prompt in two namespaces."""
    return [PromptKeys(namespace_of(name)).extend(PROMPT) for name in ("one", "two")]


@pytest.fixture
def filled(url, prompts):
    """The URL of a pool with both prompts and nothing else."""
    is_filled = url.startswith("mooncake") and len(namespaces(url)) == len(prompts)
    return url if is_filled else fill(url, prompts)  # to connect to Mooncake takes a second


@pytest.fixture
def filled_file(file_url, prompts):
    return fill(file_url, prompts)


def fill(url, prompts):
    store = open_store(url, read_settings())
    for keys in prompts:
        save(store, keys)
    store.close()
    return url
