"""open_store: which store a URL is, what a wrong one says, and that no secret ever shows."""

from __future__ import annotations

import contextlib
import sys

import pytest

from pdstore.errors import ConfigError, MissingExtra
from pdstore.settings import Settings
from pdstore.store import open_store


@pytest.mark.misconfiguration("the password in the user's place, `redis://secret@host`")
@pytest.mark.parametrize(
    ("url", "name", "label"),
    [
        ("memory://", "MemoryStore", "memory://"),
        ("memory://tests?budget=1MiB&lease=3", "MemoryStore", "memory://tests"),
        ("file://{tmp}/pool?budget=1GiB&lease=3", "FileStore", "file://{tmp}/pool"),
        ("file://{tmp}/a%20pool", "FileStore", "file://{tmp}/a%20pool"),
        ("redis://", "RedisStore", "redis://"),
        ("redis://host:7000/2?timeout=0.5", "RedisStore", "redis://host:7000/2"),
        ("rediss://user:secret@host/1", "RedisStore", "rediss://user:***@host/1"),
        ("redis+unix://:secret@/run/redis.sock?db=2", "RedisStore", None),
        ("valkey+cluster://:secret@a:1,b", "RedisStore", "valkey+cluster://:***@a:1,b"),
        ("redis://secret@a:1", "RedisStore", "redis://***@a:1"),
    ],
)
def test_a_url_opens_its_store_without_connecting(url, name, label, tmp_path):
    with contextlib.closing(open_store(url.format(tmp=tmp_path), Settings())) as store:
        assert type(store).__name__ == name
        if label is not None:
            assert store.label == label.format(tmp=tmp_path)
        assert "secret" not in store.label + repr(store)


@pytest.mark.misconfiguration("an unknown scheme")
@pytest.mark.parametrize("url", ["", "memory", "file:/x", "reddis://host", "http://host", "://"])
def test_an_unknown_scheme_names_those_there_are(url):
    with pytest.raises(ConfigError, match=r"must start with one of memory://, file://, redis://"):
        open_store(url, Settings())


@pytest.mark.parametrize(
    ("url", "meant"),
    [("/tmp/x", "file:///tmp/x"), ("file:/x", "file:///x"), ("reddis://h", "redis://")],
)
def test_a_slip_in_a_scheme_comes_with_the_url_that_was_meant(url, meant):
    with pytest.raises(ConfigError, match=rf"did you mean {meant}\? "):
        open_store(url, Settings())


@pytest.mark.misconfiguration("an extra is not installed")
def test_a_missing_package_comes_with_its_install_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pdstore.store.redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[redis\]'") as caught:
        open_store("redis://host", Settings())
    assert isinstance(caught.value, ImportError)
