"""Arenas for tests: small files in a directory of the test's own."""

from __future__ import annotations

import pytest

from pdstore.native.library import load_library
from pdstore.store.arena.store import ArenaStore
from tests.support.kv import settings_of


@pytest.fixture(scope="session")
def library():
    return load_library(settings_of(native="require"), for_gpu=False)


@pytest.fixture
def open_arena(library, tmp_path, closed_after):
    """Opens stores on arenas of one directory; closed at the end."""

    def open_arena(name="pool", **options):
        return closed_after(ArenaStore(library, name, directory=tmp_path, **options))

    return open_arena
