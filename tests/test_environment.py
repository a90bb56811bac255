"""Environment variables of others: cache directories and Mooncake's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import (
    default_pool_directory,
    mooncake_sources,
    native_cache_directory,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MOONCAKE_", "MC_", "XDG_")):
            monkeypatch.delenv(name)


def test_everything_is_kept_in_the_cache_directory_of_this_user(monkeypatch, tmp_path):
    places = (default_pool_directory, native_cache_directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {place().parent for place in places} == {tmp_path / ".cache" / "pdstore"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert {place().parent for place in places} == {tmp_path / "xdg" / "pdstore"}


def test_the_file_that_a_variable_names_is_read(monkeypatch, tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text('{"x": 1}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    assert mooncake_sources()[1:] == (str(file), '{"x": 1}')


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_file_that_cannot_be_read_is_named(monkeypatch, tmp_path, content):
    file: Path = tmp_path / "mooncake.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    with pytest.raises(ConfigError, match=r"mooncake\.json"):
        mooncake_sources()
