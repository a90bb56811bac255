"""Faults of the system: what is mended, what is an error, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess

import pytest

from pdstore.errors import StoreDenied, StoreFull, StoreUnavailable
from pdstore.format.block import START_BYTES
from pdstore.format.keys import BlockKey
from pdstore.store.file.files import UNREADABLE
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import filled_slots, get, put
from tests.support.file_pool import SIZE, fill, num_temporaries, path_of, stored
from tests.support.swap_case import SwapBench


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.EIO, StoreUnavailable),
        (errno.EMFILE, StoreUnavailable),
    ],
)
@pytest.mark.parametrize("verb", ["match", "get", "put", "remove"])
def test_an_error_of_the_system_says_where_and_counts(store, monkeypatch, number, kind, verb):
    keys = fill(store, 3)
    new = BlockKey(f"{keys[1]}:partial:1")
    paths = {str(path_of(store, keys[1]))}
    call = {"match": "utime", "get": "open", "put": "link", "remove": "unlink"}[verb]
    if verb == "put":
        paths = {str(path_of(store, new))}
    if verb in ("match", "get") and number in UNREADABLE:
        paths |= {str(path_of(store, key)) for key in (keys[0], keys[2])}  # one alone is a miss
    real = getattr(os, call)

    def failing(*args, **kwargs):
        if not paths.isdisjoint(args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    calls = {
        "match": lambda: store.match(keys),
        "get": lambda: get(store, keys, [SIZE] * 3),
        "put": lambda: put(store, [keys[0], new, keys[2]], [b"x" * 64] * 3),
        "remove": lambda: store.remove(keys),
    }
    with pytest.raises(kind, match=re.escape(f"{store.label}: {os.strerror(number)}")) as caught:
        calls[verb]()
    assert caught.value.num_done == (1 if len(paths) == 1 else 0)
    assert num_temporaries(store) == 0


def test_a_write_that_fails_half_way_leaves_nothing(store, monkeypatch):
    real, keys = os.write, fresh_keys(2)

    def half(fd, data):
        if len(data) == SIZE:
            return real(fd, data[: SIZE // 2])
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StoreUnavailable):
        put(store, keys, [content(key, SIZE) for key in keys])
    monkeypatch.undo()
    assert store.match(keys[:1]) == 0
    assert num_temporaries(store) == 0
    assert put(store, keys, [content(key, SIZE) for key in keys]) == 2


def test_a_full_disk_is_evicted_once_and_put_again(store, monkeypatch):
    old = fill(store, 10, age_s=100)
    real, failed = os.write, []

    def full_once(fd, data):
        if not failed:
            failed.append(fd)
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full_once)
    [key] = fill(store, 1)
    assert get(store, [key], [SIZE]) == [content(key, SIZE)]
    assert len(stored(store, old)) < 10


@pytest.mark.misconfiguration("the budget or the disk is full, or a prompt needs more")
def test_a_full_file_system_is_store_full_and_leaves_nothing_half_written(full_disk):
    with contextlib.closing(FileStore(full_disk / "pool", budget=1 << 30)) as store:
        keys = fresh_keys(100)
        with pytest.raises(StoreFull) as caught:
            put(store, keys, [content(key, SIZE) for key in keys])
        done = caught.value.num_done
        assert 40 < done <= 64
        assert store.match(keys) == done
        assert get(store, keys, [SIZE] * 100) == [content(key, SIZE) for key in keys[:done]]
        assert num_temporaries(store) == 0


@pytest.mark.parametrize("leased", [False, True])
def test_a_marker_is_stored_on_a_file_system_without_inodes(full_disk, leased):
    """D waits for the marker, which says that P's save failed."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=60", full_disk], check=True)
    with contextlib.closing(FileStore(full_disk / "pool", budget=1 << 30)) as store:
        keys = fresh_keys(60)
        with pytest.raises(StoreFull) as caught:
            put(store, keys, [b"x" * 64] * 60)
        assert caught.value.num_done > 10
        if leased:
            assert store.match(keys) == caught.value.num_done
        failed = BlockKey("pds1:00:handoff:12:0:failed")
        assert put(store, [failed], [b"x" * 64]) == 1
        assert store.match([failed]) == 1
        assert len(stored(store, keys)) >= caught.value.num_done - 3
        assert num_temporaries(store) == 0


@pytest.fixture
def put_sealed(library):
    """Puts values by the library; their first bytes are written to the slots by it, too."""
    bench = SwapBench(library, "cpu")

    def put_sealed(store, keys, values):
        starts = b"".join([value[:START_BYTES] for value in values])
        slots = filled_slots([bytes(START_BYTES) + value[START_BYTES:] for value in values])
        return store.put_sealed(keys, slots, starts, bench.swap.engine)

    yield put_sealed
    bench.swap.close()


@pytest.mark.misconfiguration("the file system has no inodes left")
def test_a_sealed_put_without_inodes_is_store_full_and_leaves_room_for_a_marker(
    full_disk, put_sealed
):
    subprocess.run(["mount", "-o", "remount,nr_inodes=60", full_disk], check=True)
    with contextlib.closing(FileStore(full_disk / "pool", budget=1 << 30)) as store:
        keys = fresh_keys(60)
        with pytest.raises(StoreFull, match="no inodes are left") as caught:
            put_sealed(store, keys, [b"x" * 64] * 60)
        assert sum(store.which_stored(keys)) > 10
        assert store.match(keys) == caught.value.num_done
        assert put(store, [BlockKey("pds1:00:handoff:12:0:failed")], [b"x" * 64]) == 1
        assert num_temporaries(store) == 0
