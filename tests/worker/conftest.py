"""Instances of both halves over one store, and the native library."""

from __future__ import annotations

import pytest

from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import POISON
from tests.support.native_kit import library as library
from tests.support.native_kit import mended as mended


@pytest.fixture
def p(instance):
    return instance()


@pytest.fixture
def d(instance):
    return instance(fill=POISON)
