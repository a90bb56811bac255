"""Environment variables of others: cache directories."""

from __future__ import annotations

import os

import pytest

from pdstore.environment import cache_directory


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MOONCAKE_", "MC_", "XDG_")):
            monkeypatch.delenv(name)


def test_everything_is_kept_in_the_cache_directory_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("pool") == tmp_path / ".cache" / "pdstore" / "pool"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory("native") == tmp_path / "xdg" / "pdstore" / "native"
