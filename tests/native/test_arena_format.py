"""format_arena: sizes that no arena has."""

from __future__ import annotations

import os

import pytest

from pdstore.native.arena_format import format_arena

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "slab"), [(0, MIB), (MIB + 1, MIB), (MIB, 0), (MIB, 4095), (-MIB, MIB), (MIB, -MIB)]
)
def test_sizes_that_do_not_fit_are_refused(library, tmp_path, size, slab):
    fd = os.open(tmp_path / "arena", os.O_CREAT | os.O_RDWR, 0o600)
    with pytest.raises(ValueError, match="no arena has"):
        format_arena(library, fd, size, slab, seed=1)
    os.close(fd)
