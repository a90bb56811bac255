"""Measures an arena: bytes copied, calls that move none, and how soon a marker wakes D.

    python -m benchmarks.arena --json benchmarks/results/arena.json

Beside it a file store in the same directory, by default /dev/shm. Stores take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.command import parser_of, run
from benchmarks.report import Report, seconds_of
from pdstore.format.keys import BlockKey
from pdstore.native.library import load_library
from pdstore.settings import read_settings
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Slots, Store
from pdstore.store.file.store import FileStore
from pdstore.store.in_place import Loan, Reservation
from pdstore.testing.values import fresh_keys

MIB = 1 << 20


class Stores:
    """An arena and a file store with room for three batches each."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        library = load_library(read_settings(native="require"), for_gpu=False)
        assert library is not None
        self.arena = ArenaStore(
            library, f"bench-{secrets.token_hex(4)}", directory=directory, size=4 * num_bytes
        )
        self.file = FileStore(directory / f"bench-{secrets.token_hex(4)}", budget=4 * num_bytes)

    def close(self) -> None:
        """Closes both; the arena's file is removed."""
        self.arena.path.unlink()
        self.arena.close()
        self.file.close()


def copies(report: Report, stores: Stores, given: argparse.Namespace) -> None:
    """Puts and gets batches of values by memcpy; the first of each store touches its memory."""
    count = given.bytes // given.value
    view = memoryview(bytearray(given.bytes))
    slots = Slots(view, given.value, range(count), [given.value] * count)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds + 1):
        for name, store in (("arena", stores.arena), ("file", stores.file)):
            keys = fresh_keys(count)
            for verb, call in (("put", store.put), ("get", store.get)):
                taken = seconds_of(partial(call, keys, slots))
                seconds.setdefault((name, verb), []).append(taken)
            store.remove(keys)
    for (name, verb), times in seconds.items():
        rate = given.bytes / 1e9 / median(times[1:])
        report.add(f"{name}: {verb}, values of {given.value >> 10} KiB", rate, "GB/s")


def calls(report: Report, store: ArenaStore, given: argparse.Namespace) -> None:
    """Times the calls that move no bytes, for batches of 16 values, per value."""
    seconds: dict[str, list[float]] = {}
    for _ in range(200):
        keys = fresh_keys(16)
        for verb, one in in_place_calls(store, keys, given.value):
            seconds.setdefault(verb, []).append(seconds_of(one))
        store.remove(keys)
    for verb, times in seconds.items():
        report.add(f"{verb}, a value of a batch of 16", median(times) / 16 * 1e6, "us")


def in_place_calls(
    store: ArenaStore, keys: list[BlockKey], size: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields each call with its name; one works on what those before it have left."""
    sizes = [size] * len(keys)
    reserved: list[Reservation] = []
    borrowed: list[Loan] = []
    yield "reserve", lambda: reserved.append(store.reserve(keys, sizes))
    yield "publish", lambda: store.publish(reserved[0], len(keys))
    yield "abandon", lambda: store.abandon(reserved[0])
    yield "match", lambda: store.match(keys)
    yield "which_stored", lambda: store.which_stored(keys)
    yield "borrow", lambda: borrowed.append(store.borrow(keys, sizes))
    yield "still_there", lambda: store.still_there(borrowed[0])


def wakes(report: Report, stores: Stores) -> None:
    """Times from before a marker's put to the return of a waiting thread that then matched it."""
    marker = Slots(memoryview(bytearray(64)), 64, [0], [64])
    delays = [wake(stores.arena, key, marker) for key in fresh_keys(200)]
    report.add("put of a marker -> woken and matched, median", median(delays) * 1e6, "us")
    report.add("the same, 99th percentile", sorted(delays)[-3] * 1e6, "us")


def wake(store: Store, key: BlockKey, marker: Slots) -> float:
    assert isinstance(store, ArenaStore)
    seen, woken, waits = store.wait_for_change(None, 0.0), [0.0], threading.Event()

    def wait() -> None:
        waits.set()
        store.wait_for_change(seen, 10.0)
        assert store.match([key]) == 1
        woken[0] = time.perf_counter()

    waiter = threading.Thread(target=wait)
    waiter.start()
    waits.wait()
    time.sleep(0.002)  # it is in the call now
    start = time.perf_counter()
    store.put([key], marker)
    waiter.join()
    return woken[0] - start


def main() -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--bytes", type=int, default=256 * MIB, help="of a batch")
    parser.add_argument("--value", type=int, default=2 * MIB, help="bytes of a value")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    report = Report("an arena, and files beside it", ["what", "median", "unit"])
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as directory,
        contextlib.closing(Stores(Path(directory), given.bytes)) as stores,
    ):
        copies(report, stores, given)
        calls(report, stores.arena, given)
        wakes(report, stores)
    return report


if __name__ == "__main__":
    main()
