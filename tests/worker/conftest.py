"""Instances of both halves over one store, an arena, and the native library."""

from __future__ import annotations

import pytest

from pdstore.store import open_store
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import POISON, settings_of
from tests.support.native_kit import library as library
from tests.support.native_kit import mended as mended


@pytest.fixture
def arena(tmp_path, library, closed_after):
    return closed_after(open_store(f"shm://test?size=8MiB&dir={tmp_path}", settings_of()))


@pytest.fixture
def p(instance):
    return instance()


@pytest.fixture
def d(instance):
    return instance(fill=POISON)
