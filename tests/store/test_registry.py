"""open_store finds stores of installed packages, and says which package it cannot use."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.connect import check_url
from pdstore.testing import fresh_keys

SHELF = """
from pdstore.store.memory import MemoryStore

class ShelfStore(MemoryStore):
    @classmethod
    def open(cls, url, settings):
        url.finish("none")
        return cls(url.label)

class Checked(ShelfStore):
    @classmethod
    def check(cls, url, settings):
        url.finish("none")

class NoStore:
    @classmethod
    def open(cls, url, settings):
        return cls()

class Shut(MemoryStore):
    open = None
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package: a module, and the metadata that pip would write."""

    def install(name: str, entry_points: str, module: str = SHELF) -> None:
        site = tmp_path / name
        info = site / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[pdstore.stores]\n{entry_points}\n")
        monkeypatch.syspath_prepend(site)

    return install


def refusal_of(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        open_store(url, Settings())
    return str(caught.value)


def test_the_store_of_an_installed_package_opens_by_its_scheme(install):
    install("shelf", "shelf = shelf:ShelfStore")
    with contextlib.closing(open_store("shelf://books", Settings())) as store:
        assert type(store).__name__ == "ShelfStore"
        assert store.label == "shelf://books"
        assert store.match(fresh_keys(1)) == 0


@pytest.mark.parametrize(
    "url",
    [
        *("memory://?budget=x", "file://here", "file:///?lease=3", "file://{tmp}/p?lease=4000"),
        *("redis://host/x", "redis://a,b", "valkey+unix://", "redis+sentinel://host"),
        *("shm://-a", "shm://a?dir={tmp}/none", "shm://a?dir={tmp}&size=0", "shm://a:1"),
        *("mooncake://", "mooncake://m?colour=red", "faulty+memory://?error_rate=2"),
        *("faulty+redsi://x", "faulty+file://{tmp}/p?colour=red", "http://x", "file://{tmp}/p?a"),
    ],
)
def test_a_check_says_what_opening_would_and_makes_nothing(url, tmp_path):
    url = url.format(tmp=tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_url(url, Settings())
    assert str(caught.value) == refusal_of(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nothing:ShelfStore", "cannot be loaded: No module named 'nothing'"),
        ("broken:Nothing", "cannot be loaded: module 'broken' has no attribute 'Nothing'"),
        ("broken:NoStore", "opened NoStore, which is no pdstore.Store"),
        ("broken:Shut", r"has no method `open(url, settings)`"),
    ],
)
def test_a_broken_package_is_named(install, value, words):
    install("broken", f"shelf = {value}")
    text = refusal_of("shelf://")
    assert text.startswith(f"'{value}' of broken 1.2, which serves shelf://,")
    assert words in text


def test_two_packages_of_one_scheme_are_both_named(install):
    install("one", "shelf = one:ShelfStore")
    install("two", "shelf = two:ShelfStore")
    text = refusal_of("shelf://")
    assert "shelf:// is claimed by " in text
    assert "one 1.2" in text
    assert "two 1.2" in text


def test_a_package_cannot_take_a_scheme_of_pdstores_own(install):
    install("thief", "memory = thief:ShelfStore")
    expected = "memory:// is claimed by pdstore itself and by thief 1.2: uninstall all but one"
    assert refusal_of("memory://") == expected
