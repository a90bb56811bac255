"""`file://...?direct=1`: the contract past the page cache, and where it is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from pdstore.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from pdstore.format.block import START_BYTES
from pdstore.native.library import load_library
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file.direct import DirectFiles
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import filled_slots, get, put
from tests.support.disk import disk as disk
from tests.support.file_pool import SIZE, FileStoreTests, num_temporaries, path_of
from tests.support.kv import settings_of
from tests.support.same_arguments import SameArguments
from tests.support.swap_case import SwapBench

MIB = 1 << 20
WAYS = ["io_uring", "threads", "python"]


def direct_store(root, way, budget=None) -> FileStore:
    """Opens a direct store: by io_uring, by threads, or without the native library."""
    native = "off" if way == "python" else "require"
    built = partial(load_library, settings_of(native=native), for_gpu=False)
    direct = DirectFiles(built, by_threads=way == "threads")
    return FileStore(root, budget=budget, built=built, direct=direct)


class TestDirectFileStore(SameArguments, FileStoreTests):
    @pytest.fixture(params=WAYS)
    def open_at(self, disk, request, closed_after):
        """Opens a store at a directory's name and a budget."""
        return lambda name, budget=None: closed_after(
            direct_store(disk / name, request.param, budget)
        )


@pytest.fixture(params=WAYS)
def direct(disk, request):
    with contextlib.closing(direct_store(disk / "pool", request.param)) as store:
        yield store


@pytest.mark.parametrize("size", [1, 64, 4095, 4097, MIB + 64, 3 * MIB + 4096 + 64])
def test_values_of_odd_lengths_are_files_of_exactly_that_length(direct, size):
    keys = fresh_keys(3)
    values = [content(key, size) for key in keys]
    assert put(direct, keys, values) == 3
    assert [path_of(direct, key).read_bytes() for key in keys] == values
    assert get(direct, keys, [size] * 3) == values
    assert num_temporaries(direct) == 0


@pytest.mark.parametrize("first", [True, False])
def test_it_shares_a_pool_with_a_store_that_uses_the_page_cache(direct, first):
    size = MIB + 64
    keys = fresh_keys(2)
    values = [content(key, size) for key in keys]
    with contextlib.closing(FileStore(direct.root)) as cached:
        writer, reader = (direct, cached) if first else (cached, direct)
        put(writer, keys, values)
        assert get(reader, keys, [size] * 2) == values


def test_reads_leave_the_page_cache_as_it_is(direct):
    """`mincore` would need a mapping; the kernel tells by `preadv2` what it can read at once."""
    size = 4 * MIB
    [key] = fresh_keys(1)
    put(direct, [key], [content(key, size)])
    assert get(direct, [key], [size]) == [content(key, size)]
    file = os.open(path_of(direct, key), os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            os.preadv(file, [bytearray(4096)], MIB, os.RWF_NOWAIT)
    finally:
        os.close(file)


@pytest.mark.parametrize("size", [65, 4096, 4097, MIB, MIB + 64, 2 * MIB + 4096 + 64])
@pytest.mark.parametrize("way", ["io_uring", "threads"])
def test_what_the_library_seals_is_read_and_verified(disk, library, way, size):
    bench = SwapBench(library, "cpu")
    with contextlib.closing(bench.swap), contextlib.closing(direct_store(disk, way)) as pool:
        keys = fresh_keys(3)
        slots = filled_slots([content(key, size) for key in keys])
        starts = bytes(START_BYTES) * 3
        assert pool.put_sealed(keys, slots, starts, bench.swap.engine) == 3
        assert pool.get_right(keys, slots, starts, bench.swap.engine) == 3
        with path_of(pool, keys[1]).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            [last] = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        assert pool.get_right(keys, slots, starts, bench.swap.engine) == 0


@pytest.fixture
def small_disk(disk):
    """A file system of ext4 with 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    image = disk / "image"
    image.touch()
    os.truncate(image, 16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True)
    folder = disk / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    os.chmod(folder, 0o700)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_is_store_full_and_leaves_nothing_half_written(small_disk, way):
    with contextlib.closing(direct_store(small_disk / "pool", way, 1 << 30)) as store:
        keys = fresh_keys(60)
        with pytest.raises(StoreFull) as caught:
            put(store, keys, [content(key, MIB) for key in keys])
        done = caught.value.num_done
        assert 5 < done < 16
        assert store.match(keys) == done
        assert get(store, keys[:done], [MIB] * done) == [content(key, MIB) for key in keys[:done]]
        assert num_temporaries(store) == 0


@pytest.mark.parametrize(("call", "verb"), [("preadv", "get"), ("pwritev", "put")])
def test_an_error_of_the_disk_is_an_error_of_the_store(disk, monkeypatch, call, verb):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with contextlib.closing(direct_store(disk / "pool", "python")) as store:
        keys = fresh_keys(6)
        put(store, keys[:5], [content(key, SIZE) for key in keys[:5]])
        monkeypatch.setattr(os, call, failing)
        monkeypatch.setattr("pdstore.store.file.store.can_read", lambda _: False)
        calls = {
            "get": lambda: get(store, keys[:5], [SIZE] * 5),
            "put": lambda: put(store, keys[5:], [content(keys[5], SIZE)]),
        }
        with pytest.raises(StoreUnavailable, match=os.strerror(errno.EIO)):
            calls[verb]()
        assert num_temporaries(store) == 0


@pytest.mark.misconfiguration("`?direct=1` on a tmpfs")
def test_memory_is_refused_and_told_what_to_do():
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        pytest.raises(ConfigError, match="direct=1 is for disks, and this tmpfs is memory") as why,
    ):
        open_store(f"file://{memory}/pool?direct=1", Settings())
    assert "leave direct=1 out, or name a directory on a disk" in str(why.value)


@pytest.mark.misconfiguration("`?direct=1` on a file system without direct reads and writes")
def test_a_file_system_without_direct_reads_is_refused(disk, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ConfigError, match=r"has no direct reads and writes.*leave direct=1 out"):
        open_store(f"file://{disk}/pool?direct=1", Settings())


@pytest.mark.parametrize("why", [errno.EMFILE, errno.ETIMEDOUT, errno.EIO])
def test_an_error_at_the_start_is_not_taken_for_a_file_system_without_them(disk, monkeypatch, why):
    real = os.open

    def failing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(why, os.strerror(why))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StoreError, match=os.strerror(why)):
        open_store(f"file://{disk}/pool?direct=1", Settings())


@pytest.mark.parametrize("value", ["yes", "2", ""])
def test_another_value_than_1_and_0_is_refused(disk, value):
    with pytest.raises(ConfigError, match=f"direct={value!r} is neither 1 nor 0"):
        open_store(f"file://{disk}/pool?direct={value}", Settings())


WITHOUT_RING = """
import contextlib, ctypes, struct, sys
from pdstore.native.library import load_library
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.testing.values import assert_stored, fresh_keys, put

url = sys.argv[1]
settings = read_settings(store=url, native="require")
load_library(settings, for_gpu=False)
# A filter of seccomp: system call 425, io_uring_setup, fails with EPERM; all others are allowed.
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
with contextlib.closing(open_store(url, settings)) as store:
    keys = fresh_keys(4)
    values = [bytes([n]) * (3 << 20) for n in range(4)]
    assert put(store, keys, values) == 4
    assert_stored(store, keys, values)
"""


@pytest.mark.misconfiguration("io_uring is refused, as in a container, with `?direct=1`")
def test_where_io_uring_is_refused_threads_do_it_and_a_warning_says_so(disk):
    url = f"file://{disk}/pool?direct=1"
    command = [sys.executable, "-c", WITHOUT_RING, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "io_uring is refused here (Operation not permitted)" in done.stderr
    assert "seccomp" in done.stderr


def test_where_io_uring_is_allowed_nothing_is_said_about_it(disk, library):
    with contextlib.closing(direct_store(disk / "pool", "io_uring")) as store:
        said = [doubt.subject for doubt in store.doubts]
    assert ("direct" in said) == bool(library.why_no_ring())
    assert Path(disk / "pool").is_dir()
