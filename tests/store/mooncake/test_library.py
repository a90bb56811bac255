"""Mooncake's module is imported with the right settings, and its absence says what to install."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from pdstore.errors import MissingExtra
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.mooncake import library as mooncake_library
from pdstore.store.registry import check_url


def test_the_librarys_settings_are_made_before_it_is_imported_and_the_users_kept():
    """Rule 7: its own defaults wait 30 s and more."""
    code = (
        "import os, sys\n"
        "from pdstore.store.mooncake import library\n"
        "from pdstore.store.mooncake.config import MooncakeConfig\n"
        "def load():\n"
        "    print({n: v for n, v in os.environ.items() if n.startswith('MC_')})\n"
        "library._load = load\n"
        "library.Library(MooncakeConfig(master='127.0.0.1:1'))\n"
    )
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MC_")}
    environment["MC_RPC_TIMEOUT_MS"] = "123"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    expected = {**mooncake_library.VARIABLES, "MC_RPC_TIMEOUT_MS": "123"}
    assert eval(done.stdout) == {**expected, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'pdstore\[mooncake\]'"),
        (
            ImportError("libcurl.so.4: cannot open shared object file"),
            r"libcurl.so.4.* apt-get install libibverbs1 libcurl4 libnuma1",
        ),
        (ImportError("libcudart.so.12: cannot open"), r"pdstore\[mooncake-cpu\]"),
    ],
)
def test_what_is_not_installed_is_said_with_the_command(monkeypatch, error, words):
    usual = importlib.import_module

    def fail(name):
        if name == "mooncake.store":
            raise error
        return usual(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingExtra, match=words):
        open_store("mooncake://127.0.0.1:1", Settings())


def test_what_is_not_installed_is_said_before_it_is_opened(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[mooncake\]'"):
        check_url("mooncake://localhost", Settings())
