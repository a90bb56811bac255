"""Files moved past the page cache by the library: by io_uring, and by threads."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import resource
import threading
from array import array

import pytest

from pdstore.format.block import START_BYTES, checksum
from pdstore.native.library import FileWay
from pdstore.store.base import Slots
from pdstore.testing.values import empty_slots, exit_code_of, filled_slots
from tests.support.disk import disk as disk
from tests.support.native_kit import addresses_and_sizes
from tests.support.swap_case import SwapBench

WAYS = [FileWay.CACHED, FileWay.DIRECT, FileWay.DIRECT_BY_THREADS]
MIB = 1 << 20  # of a file that move at a time
SIZES = [64, 65, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, MIB + 64, 3 * MIB + 4096, 40 * MIB + 17]
IO_URING_SETUP = 425

pytestmark = pytest.mark.parametrize("way", WAYS, ids=["cached", "io_uring", "threads"])


@pytest.fixture
def engine(library):
    bench = SwapBench(library, "cpu")
    yield bench.swap.engine
    bench.swap.close()


def sealed(value: bytes) -> bytes:
    sum_ = checksum(memoryview(value)).to_bytes(8, "little")
    return value[:START_BYTES] + sum_ + value[START_BYTES + 8 :]


def aligned(sizes) -> Slots:
    """Slots of whole pages, filled with 0xee."""
    slot_bytes = -(-max(sizes) // 4096) * 4096
    view = memoryview(mmap.mmap(-1, slot_bytes * len(sizes)))
    view[:] = b"\xee" * len(view)
    return Slots(view, slot_bytes, range(len(sizes)), sizes)


def contents_of(sizes) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


def write(engine, folder, values, slots, way):
    """Writes sealed values to files 0, 1, ...; returns what the engine says, and the paths."""
    for i, value in enumerate(values):
        slots.value(i)[START_BYTES:] = value[START_BYTES:]
    starts = b"".join(value[:START_BYTES] for value in values)
    paths = [str(folder / f"{i}") for i in range(len(values))]
    places = addresses_and_sizes(slots)
    return engine.write_values(str(folder / "new"), paths, *places, starts, way), paths


@pytest.mark.parametrize("make", [aligned, empty_slots], ids=["aligned", "anywhere"])
def test_values_of_all_lengths_are_written_and_read_and_nothing_beside_them(
    engine, disk, way, make
):
    values = contents_of(SIZES)
    slots = make(SIZES)
    ended, paths = write(engine, disk, values, slots, way)
    assert ended == (len(values), 0)
    for path, value, i in zip(paths, values, range(len(values)), strict=True):
        assert slots.value(i) == sealed(value)
        with open(path, "rb") as file:
            assert file.read() == sealed(value)
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert len(os.listdir(disk)) == len(values)
    found = make(SIZES)
    starts = b"".join(value[:START_BYTES] for value in values)
    assert engine.read_values(paths, *addresses_and_sizes(found), starts, way)
    for i, value in enumerate(values):
        assert found.value(i) == sealed(value)
        end = i * found.slot_bytes + len(value)
        beside = bytes(found.view[end : (i + 1) * found.slot_bytes])
        assert beside.count(b"\xee") == len(beside), "memory behind the value"


@pytest.mark.parametrize("place", [10, 60, 64, MIB - 1, MIB, MIB + 64, 3 * MIB + 10])
def test_a_byte_that_changed_is_seen_wherever_it_is(engine, disk, way, place):
    [value] = contents_of([3 * MIB + 17])
    slots = aligned([len(value)])
    _, [path] = write(engine, disk, [value], slots, way)
    places = addresses_and_sizes(slots)
    assert engine.read_values([path], *places, value[:START_BYTES], way)
    with open(path, "r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert not engine.read_values([path], *places, value[:START_BYTES], way)


@pytest.mark.parametrize("more", [-4096, -1, 1, 4096])
def test_a_file_of_another_length_is_told(library, disk, way, more):
    (disk / "right").write_bytes(b"x" * 8192)
    (disk / "other").write_bytes(b"x" * (8192 + more))
    paths = [str(disk / "right"), str(disk / "other")]
    assert library.read_files(way, paths, *addresses_and_sizes(aligned([8192] * 2))) == (1, -1)


def test_what_is_no_regular_file_is_told(library, disk, way):
    (disk / "folder").mkdir()
    os.mkfifo(disk / "pipe")
    (disk / "link").symlink_to(disk / "pipe")
    for name, why in (
        ("folder", errno.EISDIR),
        ("pipe", errno.ENXIO),
        ("link", errno.ELOOP),
        ("nothing", errno.ENOENT),
    ):
        places = addresses_and_sizes(aligned([64]))
        assert library.read_files(way, [str(disk / name)], *places) == (0, why)


def test_a_failure_of_the_kernel_is_told_with_its_value(library, disk, way):
    """No memory lies at the third address, so the kernel fails while it moves the bytes."""
    slots = aligned([4 * MIB] * 4)
    addresses, sizes = addresses_and_sizes(slots)
    paths = [str(disk / f"{i}") for i in range(4)]
    assert library.write_files(way, str(disk / "new"), paths, addresses, sizes) == (4, 0)
    bad = array("Q")
    bad.frombytes(addresses)
    bad[2] = 4096
    assert library.read_files(way, paths, bad.tobytes(), sizes) == (2, errno.EFAULT)
    others = [str(disk / f"other{i}") for i in range(4)]
    ended = library.write_files(way, str(disk / "new"), others, bad.tobytes(), sizes)
    assert ended == (2, errno.EFAULT)
    assert not os.path.exists(others[2])
    assert not list(disk.glob("new*")), "nothing unfinished is left"


def test_a_file_that_is_there_stays(library, disk, way):
    (disk / "1").write_bytes(b"first")
    slots = filled_slots([b"new" * 2000] * 3)
    paths = [str(disk / name) for name in ("0", "1", "x/2")]
    places = addresses_and_sizes(slots)
    assert library.write_files(way, str(disk / "new"), paths, *places) == (3, 0)
    assert (disk / "1").read_bytes() == b"first"
    assert (disk / "x" / "2").read_bytes() == b"new" * 2000


def test_threads_and_a_child_have_rings_of_their_own(library, disk, way):
    values = contents_of([2 * MIB + n for n in range(6)])
    paths = []
    for i, value in enumerate(values):
        (disk / f"{i}").write_bytes(value)
        paths.append(str(disk / f"{i}"))
    wrong = []

    def read():
        for _ in range(5):
            slots = aligned([len(value) for value in values])
            ended = library.read_files(way, paths, *addresses_and_sizes(slots))
            right = [slots.value(i) == value for i, value in enumerate(values)]
            if ended != (6, 0) or not all(right):
                wrong.append((ended, right))

    def child():
        read()
        os._exit(len(wrong))

    read()  # the ring that a child inherits
    assert exit_code_of(child) == 0
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_process_that_may_have_no_more_threads_reads_and_writes_all(library, disk, way):
    """The kernel then cancels what its own threads would have done for a ring."""
    slots = aligned([4 * MIB + 64] * 8)
    places = addresses_and_sizes(slots)

    def child():
        if os.geteuid() == 0:  # for whom there is no limit
            os.setresuid(65534, 65534, 0)
            ctypes.CDLL(None).setfsuid(0)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        for n in range(3):
            paths = [str(disk / f"{n}-{i}") for i in range(8)]
            if library.write_files(way, str(disk / "new"), paths, *places) != (8, 0):
                return False
            if library.read_files(way, paths, *places) != (8, 0):
                return False
        return True

    assert exit_code_of(child) == 0


def test_a_child_that_has_closed_its_files_loses_none_of_the_next(library, disk, way):
    """The number of its parent's ring may be that of another file."""
    slots = aligned([MIB] * 2)
    paths = [str(disk / f"{i}") for i in range(2)]
    places = addresses_and_sizes(slots)

    def child():
        highest = max(map(int, os.listdir("/proc/self/fd")))
        os.closerange(3, highest + 1)
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(3, highest + 1)]
        is_read = library.read_files(way, paths, *places) == (2, 0)
        for file in files:
            os.fstat(file)  # OSError if it is closed
        return is_read

    assert library.write_files(way, str(disk / "new"), paths, *places) == (2, 0)
    assert exit_code_of(child) == 0


def test_more_values_than_a_process_may_open_files_are_read(library, disk, way):
    values = contents_of([MIB + n for n in range(40)])
    paths = [str(disk / f"{i}") for i in range(40)]
    for path, value in zip(paths, values, strict=True):
        with open(path, "wb") as file:
            file.write(value)

    def child():
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while os.open("/dev/null", os.O_RDONLY) < highest:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, highest + 6))
        slots = aligned([len(value) for value in values])
        ended = library.read_files(way, paths, *addresses_and_sizes(slots))
        return ended == (40, 0) and all(slots.value(i) == values[i] for i in range(40))

    assert exit_code_of(child) == 0


def test_the_library_says_whether_io_uring_is_allowed(library, way):
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    file = libc.syscall(IO_URING_SETUP, 4, parameters)
    refused = ctypes.get_errno() if file < 0 else 0
    if file >= 0:
        os.close(file)
    assert library.why_no_ring() == refused
