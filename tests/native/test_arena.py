"""The library's arenas: forks, and arguments that the library itself refuses."""

from __future__ import annotations

import os

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.native.arena import ArenaTimes, NativeArena, format_arena

MIB = 1 << 20
TIMES = ArenaTimes(1.0, 1.0, 1.0, 1.0, lock_timeout_s=0.5)


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "arena", os.O_CREAT | os.O_RDWR, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def open_arena(library, fd):
    format_arena(library, fd, 4 * MIB, MIB, seed=1)
    return lambda: NativeArena(library, fd, TIMES, "the arena")


def test_a_file_that_is_no_arena_is_refused(library, fd):
    with pytest.raises(StoreUnavailable):
        NativeArena(library, fd, TIMES, "the arena")


@pytest.mark.parametrize("key", ["", "k" * 201])
def test_a_key_of_no_length_or_too_long_is_refused(open_arena, key):
    with pytest.raises(ValueError, match="argument"):
        open_arena().find(["a", key], leases=True)


def test_an_unknown_kind_is_refused(open_arena):
    with pytest.raises(ValueError, match="argument"):
        open_arena().put(1 << 12, ["a"], b"\3", [1 << 12], [100])


@pytest.mark.parametrize(
    ("size", "slab"), [(0, MIB), (MIB + 1, MIB), (MIB, 0), (MIB, 4095), (-MIB, MIB), (MIB, -MIB)]
)
def test_sizes_that_do_not_fit_are_refused(library, tmp_path, size, slab):
    fd = os.open(tmp_path / "arena", os.O_CREAT | os.O_RDWR, 0o600)
    with pytest.raises(ValueError, match="no arena has"):
        format_arena(library, fd, size, slab, seed=1)
    os.close(fd)
