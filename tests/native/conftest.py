"""Fixtures of the native library."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.native_kit import library as library
from tests.support.native_kit import mended as mended


@pytest.fixture
def memory_path():
    """A directory in memory: a device registers no mapped file of a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
