"""An arena whose file system is filled by somebody else says that it is full, and lives on."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from pdstore.errors import ConfigError, StoreFull
from pdstore.format.keys import BlockKey
from pdstore.native.library import address_of
from pdstore.store.arena.store import ArenaStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put

MIB = 1 << 20
PAGE = 4096
SIZE = 100_000


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(directory, leave: int) -> None:
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    (directory / "other").write_bytes(bytes(free - leave))


def test_values_are_evicted_where_the_disk_gives_no_more_memory(library, small_disk):
    options = {"directory": small_disk, "size": 8 * MIB, "slab_bytes": MIB}
    with contextlib.closing(ArenaStore(library, fresh_s=0, lease_s=1e-9, **options)) as store:
        fill(small_disk, 3 * MIB)
        keys, stored = fresh_keys(100), []
        for key in keys:
            with contextlib.suppress(StoreFull):
                put(store, [key], [content(key, SIZE)])
                stored.append(key)
        assert len(stored) > 50, "old values make room for new ones"
        assert 20 < sum(store.which_stored(keys)) < 32, "of 3 MiB"
        for key in stored[-10:]:
            assert get(store, [key], [SIZE]) == [content(key, SIZE)]


def test_a_place_has_its_memory_though_a_shorter_value_had_it_before(library, small_disk):
    """Tails of several sizes share slots: to write where the disk gives nothing is a SIGBUS."""
    with contextlib.closing(ArenaStore(library, directory=small_disk, size=8 * MIB)) as store:
        short, long = (BlockKey(f"{key}:partial:3") for key in fresh_keys(2))
        assert put(store, [short], [bytes(5 * PAGE)]) == 1
        store.remove([short])
        fill(small_disk, 0)
        value = content(long, 6 * PAGE)
        assert put(store, [long], [value]) == 1
        assert get(store, [long], [6 * PAGE]) == [value]


def stored_in_three_slabs(store) -> list[BlockKey]:
    """Puts and leases 23 values: two slabs hold ten each, seven slots were never used."""
    keys = fresh_keys(23)
    put(store, keys, [content(key, SIZE) for key in keys])
    assert store.match(keys) == 23
    return keys


def test_no_room_is_made_that_the_disk_has_no_memory_for(library, small_disk):
    options = {"directory": small_disk, "size": 3 * MIB, "slab_bytes": MIB, "lease_s": 60}
    with contextlib.closing(ArenaStore(library, **options)) as store:
        old = stored_in_three_slabs(store)
        fill(small_disk, 0)
        for new in ([MIB], [SIZE] * 24, [2 * SIZE, MIB], [MIB] * 3):
            assert not store.make_room(fresh_keys(len(new)), new)
            assert store.match(old) == 23, "nothing went in vain"
        keys, sizes = fresh_keys(8), [SIZE] * 5 + [2 * SIZE] * 3
        assert store.make_room(keys, sizes), "of what has its memory"
        assert put(store, keys, [content(*pair) for pair in zip(keys, sizes, strict=True)]) == 8
        assert sum(store.which_stored(old)) == 23 - 5 - 10
        assert get(store, keys, sizes) == [content(*pair) for pair in zip(keys, sizes, strict=True)]


@pytest.mark.parametrize("new", [[MIB], [SIZE] * 12], ids=["another size", "the same size"])
def test_nothing_is_evicted_for_values_that_the_disk_has_no_memory_for(library, small_disk, new):
    options = {"directory": small_disk, "size": 3 * MIB, "slab_bytes": MIB}
    with contextlib.closing(ArenaStore(library, fresh_s=0, lease_s=1e-9, **options)) as store:
        old, keys = stored_in_three_slabs(store), fresh_keys(len(new))
        fill(small_disk, 0)
        with pytest.raises(StoreFull):
            put(store, keys, [content(*pair) for pair in zip(keys, new, strict=True)])
        assert all(store.which_stored(old))


def test_memory_that_the_disk_does_not_give_is_no_crash(library, small_disk):
    with contextlib.closing(ArenaStore(library, directory=small_disk, size=8 * MIB)) as store:
        fill(small_disk, 3 * MIB)
        library.populate(address_of(store.memory()), 8 * MIB)
        assert store.match(fresh_keys(1)) == 0


@pytest.mark.misconfiguration("`shm://` larger than its `/dev/shm`")
def test_an_arena_that_does_not_fit_is_refused(library, small_disk):
    words = r"make it smaller \(\?size=\).* in a container, raise --shm-size"
    with pytest.raises(ConfigError, match=words):
        ArenaStore(library, directory=small_disk, size=13 * MIB)
