"""Stacks of tiers for tests; values without a header may go down."""

from __future__ import annotations

import contextlib
import secrets

import pytest

from pdstore.native.library import load_library
from pdstore.store.arena.store import ArenaStore
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import tier_states_of
from pdstore.store.tiers.store import TieredStore
from pdstore.store.wrappers import WrapperStore
from tests.support.kv import settings_of


class Counted(WrapperStore):
    """Counts the searches for purge numbers."""

    num_matches = 0

    def match(self, keys):
        self.num_matches += ":purge:" in keys[0]
        return super().match(keys)


@pytest.fixture(scope="session")
def library():
    return load_library(settings_of(native="require"), for_gpu=False)


@pytest.fixture
def open_tiers(closed_after):
    """Opens a TieredStore over stores, with limits for each lower one; closed at the end."""

    def open_tiers(*stores, limits=None, num_right=len, late_s=0.02):
        return closed_after(TieredStore(stores, limits, num_right=num_right, late_s=late_s))

    return open_tiers


@pytest.fixture
def name():
    return secrets.token_hex(6)


@pytest.fixture
def arena_of(library, tmp_path, name):
    def arena_of():
        return ArenaStore(library, name, directory=tmp_path, size=256 << 20)

    return arena_of


@pytest.fixture
def stack(open_tiers, name, tmp_path):
    """Memory over files."""
    return open_tiers(MemoryStore(f"memory://{name}"), FileStore(tmp_path / "files"))


def copies_of(store, number=1):
    """Returns the copies to and from a tier by outcome, without those that never happened."""
    copies = tier_states_of(store)[number].copies
    return {outcome: count for outcome, count in copies.items() if count}


@contextlib.contextmanager
def held(faulty):
    """Makes all calls of a Faulty hang."""
    faulty.hold()
    try:
        yield
    finally:
        faulty.release()
