"""Reads and writes of a disk past the page cache and through it, beside fio's of the same disk.

python -m benchmarks.direct --directory /a/disk [--json FILE]

In each round the ways take turns, in an order drawn anew, since a disk still works on what the last
one wrote; first to read and then to write: file:// with ?direct=1 by io_uring and by threads,
without it, and `fio` (Debian's package) with --direct=1, --ioengine=io_uring, --iodepth=32 and
--bs=1m. All read the same files, cold, and but for fio verify each value's checksum; writes add it,
and make the files, while fio's clock starts when its one file has all of its room. What is written
to the page cache is then forced to the disk. One caller at a time.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from pdstore.errors import ConfigError
from pdstore.format.block import HEADER_BYTES, START_BYTES
from pdstore.format.keys import BlockKey
from pdstore.native.engine import Engine
from pdstore.native.library import CPU, Library, PartShape, Region, address_of, load_library
from pdstore.settings import read_settings
from pdstore.store.base import Slots
from pdstore.store.file.direct import DirectFiles
from pdstore.store.file.store import FileStore

_VALUE = (8 << 20) + HEADER_BYTES
_SLOT = (8 << 20) + 4096
_FIO = "fio"
_FIO_VALUE = 8 << 20
_FILES = "[0-9a-f][0-9a-f]/pds1:*"
_WAYS = ("io_uring", "threads", "page cache", _FIO)
_COLUMNS = ("verb", "way", "GB/s", "best GB/s", "of fio", "best of fio", "CPU s/GB")


class _Measured(NamedTuple):
    """The rate of one way in one round, and the seconds of all processors for 1e9 bytes."""

    rate: float
    cpu: float


class _Pool:
    """A file store, and values that it reads and writes.

    keys: of the values that are there; another pool of the same directory may read them.
    """

    def __init__(self, store: FileStore, engine: Engine, count: int, *, is_cached: bool) -> None:
        self._store = store
        self._is_cached = is_cached
        self._engine = engine
        view = memoryview(mmap.mmap(-1, count * _SLOT))
        view[:] = secrets.token_bytes(_SLOT) * count
        self._slots = Slots(view, _SLOT, range(count), [_VALUE] * count)
        self._starts = bytes(START_BYTES) * count
        self.keys: list[BlockKey] = []

    def write(self) -> None:
        """Writes new values to the disk, in place of those that were there."""
        store, slots = self._store, self._slots
        self.keys = [BlockKey(f"pds1:bench:{secrets.token_hex(16)}") for _ in slots.sizes]
        done = store.put_sealed(self.keys, slots, self._starts, self._engine)
        assert done == len(self.keys)
        if self._is_cached:
            for file in self._files():
                os.fsync(file)

    def read(self) -> None:
        done = self._store.get_right(self.keys, self._slots, self._starts, self._engine)
        assert done == len(self.keys)

    def forget(self) -> None:
        """Drops the page cache of all values."""
        for file in self._files():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def links(self, folder: Path) -> list[Path]:
        """Gives the values' files short names, too, in a new folder."""
        folder.mkdir()
        links = []
        for n, path in enumerate(self._store.root.glob(_FILES)):
            links.append(folder / f"v{n}")
            os.link(path, links[-1])
        return links

    def remove(self) -> None:
        self._store.remove(self.keys)

    def _files(self) -> Iterator[int]:
        for path in self._store.root.glob(_FILES):
            file = os.open(path, os.O_RDONLY)
            try:
                yield file
            finally:
                os.close(file)


def bench_direct(directory: Path, num_bytes: int, rounds: int) -> Report:
    """Measures all ways in turn. Raises ConfigError without fio or the native library."""
    if shutil.which(_FIO) is None:
        raise ConfigError("fio is not installed: apt-get install fio")
    settings = read_settings(store="file://")
    library = load_library(settings, for_gpu=False)
    if library is None:
        raise ConfigError("the native library is needed, which PDSTORE_NATIVE=off turns off")
    count = max(1, num_bytes // _VALUE)
    results: dict[tuple[str, str], list[_Measured]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pdstore-direct-", dir=directory) as temporary,
        _pools(library, Path(temporary), count) as pools,
    ):
        first = pools[_WAYS[0]]
        first.write()
        for pool in pools.values():
            pool.keys = first.keys
        os.sync()
        links = first.links(Path(temporary) / "links")
        calls: dict[str, Callable[[], _Measured]]
        calls = {way: partial(_read, pool, count) for way, pool in pools.items()}
        calls[_FIO] = partial(_fio_read, links, count)
        _add_rounds("read", calls, rounds, results)
        first.remove()
        calls = {way: partial(_write, pool, count) for way, pool in pools.items()}
        calls[_FIO] = partial(_fio_write, Path(temporary) / _FIO, count)
        _add_rounds("write", calls, rounds, results)
    load = os.getloadavg()[0]
    title = f"{count} values of {_VALUE} bytes, {rounds} rounds in turn; load {load:.1f} at the end"
    return _report(title, results)


@contextmanager
def _pools(library: Library, directory: Path, count: int) -> Iterator[dict[str, _Pool]]:
    """Opens a pool for each way but fio's."""

    def built() -> Library:
        return library

    cache = memoryview(bytearray(64))
    region = Region(address_of(cache), 64, 64, 64, 64, 0, 0, 0)
    ways = {
        "io_uring": DirectFiles(built),
        "threads": DirectFiles(built, by_threads=True),
        "page cache": None,
    }
    if why := library.why_no_ring():
        raise ConfigError(f"io_uring is refused here: {os.strerror(why)}")
    with ExitStack() as stack:
        engine = Engine(library, {"device": CPU}, [PartShape(1, 1, 64, 1, 1, 1)], [region])
        stack.enter_context(closing(engine))
        pools = {}
        for way, direct in ways.items():
            store = FileStore(
                directory / "pool", budget=4 * count * _SLOT, built=built, direct=direct
            )
            stack.enter_context(closing(store))
            pools[way] = _Pool(store, engine, count, is_cached=direct is None)
        yield pools


def _add_rounds(
    verb: str,
    calls: dict[str, Callable[[], _Measured]],
    rounds: int,
    results: dict[tuple[str, str], list[_Measured]],
) -> None:
    """Lets the ways take turns, and adds what each round measured, except the first."""
    for turn in range(rounds + 1):
        for way in random.sample(_WAYS, len(_WAYS)):
            measured = calls[way]()
            if turn:
                results.setdefault((verb, way), []).append(measured)


def _read(pool: _Pool, count: int) -> _Measured:
    pool.forget()
    return _measured(pool.read, count)


def _write(pool: _Pool, count: int) -> _Measured:
    measured = _measured(pool.write, count)
    pool.remove()
    return measured


def _measured(function: Callable[[], None], count: int) -> _Measured:
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    gigabytes = count * _VALUE / 1e9
    return _Measured(gigabytes / seconds, cpu_s / gigabytes)


def _fio_read(files: Sequence[Path], count: int) -> _Measured:
    names = ":".join(map(str, files))
    return _fio("read", {"filename": names, "file_service_type": "sequential"}, count)


def _fio_write(path: Path, count: int) -> _Measured:
    return _fio("write", {"filename": path, "size": count * _FIO_VALUE, "unlink": 1}, count)


def _fio(verb: str, of_verb: dict[str, object], count: int) -> _Measured:
    options = {
        "name": "direct",
        "rw": verb,
        "direct": 1,
        "ioengine": "io_uring",
        "iodepth": 32,
        "bs": "1m",
        "output-format": "json",
        **of_verb,
    }
    command = [_FIO, *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [job] = json.loads(done.stdout)["jobs"]
    num_bytes = job[verb]["io_bytes"]
    assert num_bytes == count * _FIO_VALUE, "the same bytes as the others"
    seconds = job["job_runtime"] / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return _Measured(num_bytes / seconds / 1e9, cpu_s / (num_bytes / 1e9))


def _report(title: str, results: dict[tuple[str, str], list[_Measured]]) -> Report:
    report = Report(title, _COLUMNS)
    for verb in ("read", "write"):
        fio = _rates(results[verb, _FIO])
        for way in _WAYS:
            rates = _rates(results[verb, way])
            of_fio = median(ours / theirs for ours, theirs in zip(rates, fio, strict=True))
            cpu = median(measured.cpu for measured in results[verb, way])
            best = max(rates)
            report.add(verb, way, median(rates), best, of_fio, best / max(fio), cpu)
            shown = " ".join(f"{rate:.2f}" for rate in rates)
            report.notes.append(f"{verb}, {way}: GB/s by round {shown}")
    report.notes.append("'of fio' is the median of the rounds' ratios")
    return report


def _rates(measured: Sequence[_Measured]) -> list[float]:
    return [each.rate for each in measured]


def main() -> None:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        help="a directory on the disk; files are made in it, and removed again",
    )
    parser.add_argument(
        "--mib", type=int, default=512, help="read and written in a turn (%(default)s)"
    )
    given = parser.parse_args()
    run(lambda: bench_direct(given.directory, given.mib << 20, given.rounds), given.json)


if __name__ == "__main__":
    main()
