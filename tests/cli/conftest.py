"""Pools for the command: real files and a real redis, each with two prompts of two namespaces."""

from __future__ import annotations

import pytest

from pdstore.format.keys import PromptKeys
from pdstore.settings import read_settings
from pdstore.store import open_store
from tests.support.command import namespace_of, save

PROMPT = range(40)  # two blocks of 16 and a tail of 8


@pytest.fixture(params=["file", "redis"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/pool"
    return request.getfixturevalue("redis_server")().url


@pytest.fixture
def file_url(tmp_path):
    return f"file://{tmp_path}/pool"


@pytest.fixture
def prompts():
    """The keys of one prompt in two namespaces."""
    return [PromptKeys(namespace_of(name)).extend(PROMPT) for name in ("one", "two")]


@pytest.fixture
def filled(url, prompts):
    """The URL of a pool with both prompts."""
    return fill(url, prompts)


@pytest.fixture
def filled_file(file_url, prompts):
    return fill(file_url, prompts)


def fill(url, prompts):
    store = open_store(url, read_settings())
    for keys in prompts:
        save(store, keys)
    store.close()
    return url
