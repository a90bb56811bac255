"""Arenas for tests: small files in a directory of the test's own."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.native.library import load_library
from pdstore.store.arena.store import ArenaStore
from tests.support.kv import settings_of


@pytest.fixture(scope="session")
def library():
    return load_library(settings_of(native="require"), for_gpu=False)


@pytest.fixture
def open_arena(library, tmp_path):
    """Opens stores on arenas of one directory; closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_arena(name="pool", **options):
            return stack.enter_context(
                contextlib.closing(ArenaStore(library, name, directory=tmp_path, **options))
            )

        yield open_arena
