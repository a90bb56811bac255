"""A file store with little room, and a clock that stands still."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from pdstore.store.file.store import FileStore
from tests.support.clock import Clock
from tests.support.file_pool import SIZE
from tests.support.native_kit import library as library


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def built():
    """Returns the library for the store's files: none, so Python does all."""
    return lambda: None


@pytest.fixture
def store(tmp_path, clock, built):
    """Room for 20 values of 64 KiB."""
    pool = FileStore(tmp_path / "pool", budget=20 * SIZE, built=built, clock=clock)
    with contextlib.closing(pool):
        yield pool


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
