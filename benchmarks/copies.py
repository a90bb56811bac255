"""What a lower tier costs: CPU seconds a GB copied down and read there, beside a save alone.

    python -m benchmarks.copies --directory /a/disk [--json benchmarks/results/tier_copies.json]

An arena has files below it, through the page cache and with `direct=1`. The ways take turns:

- `save`: checksums and the put into the arena, without a tier below.
- `copy down`: what the copier does behind it: it reads the arena, verifies, writes the files.
- `copy beside a loop`: the same while a Python thread computes, as an engine's does. `loop's share`
  is what that thread reaches of its rate without a copier; its CPU seconds are in the row's.
- `save beside a copier`: the same save while the copier is busy with an earlier one. Its CPU
  seconds are those of both.
- `get above`, `get below`: reads of values from the arena, and from files that are not cached.
- `promote`: the copy of what was read below into the arena, out of its reader's memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from pdstore.errors import ConfigError
from pdstore.format import block
from pdstore.format.keys import BlockKey, prefix_of
from pdstore.settings import read_settings
from pdstore.store.base import Slots
from pdstore.store.optional import Promotes
from pdstore.store.tiers.store import TieredStore
from pdstore.store.url import StoreURL

COLUMNS = [
    *("lower tier", "way", "GB/s", "slowest", "fastest", "CPU s a GB", "least", "most"),
    "loop's share",
]
_NAMESPACE = b"bench".ljust(16, b"\0")
_RATE = "copy=1000GB/s"  # no limit: the rate of the machine is measured
_FLUSH_S = 300.0
_LOOP_S = 0.5


class Cost(NamedTuple):
    """Seconds of one way in one round: by the clock, and of all threads of the process.

    loop_share: what a Python thread beside it reached of its rate alone; None: there was none.
    """

    wall_s: float
    cpu_s: float
    loop_share: float | None = None


class Loop:
    """A Python thread that computes while the `with` statement runs."""

    def __init__(self) -> None:
        self._is_over = False
        self._num_rounds = 0
        self._began_at = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loop:
        self._began_at = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    @property
    def rate(self) -> float:
        """Rounds a second so far."""
        return self._num_rounds / (time.perf_counter() - self._began_at)

    def _run(self) -> None:
        while not self._is_over:
            self._num_rounds += 1


class Batch(NamedTuple):
    """Values in memory that one save puts. sizes: their lengths."""

    slots: Slots
    headers: Sequence[block.Header]

    @property
    def keys(self) -> list[BlockKey]:
        prefix = prefix_of(_NAMESPACE.hex())
        return [BlockKey(prefix + header.prefix_hash.hex()) for header in self.headers]

    @property
    def sizes(self) -> list[int]:
        return [*self.slots.sizes]

    def seal(self) -> None:
        """Writes the header and the checksum of each value."""
        for i, header in enumerate(self.headers):
            block.seal(self.slots.value(i), header)


class Bench:
    """One stack and the batches that go through it. size: of a value. count: values of a batch."""

    def __init__(self, store: TieredStore, files: Path, size: int, count: int) -> None:
        self._store = store
        self._files = files
        self._size = size
        self._memory = store.allocate(2 * size * count)
        self._memory[:] = secrets.token_bytes(len(self._memory))
        self._count = count
        self.num_bytes = size * count

    def turn(self, is_reversed: bool) -> dict[str, Cost]:
        """Measures each way once. Raises ConfigError if a value did not reach the files."""
        batch, other = self._batch(0), self._batch(1)
        costs = {}
        saves = [("save", self._save), ("save beside a copier", self._save_beside)]
        for name, save in reversed(saves) if is_reversed else saves:
            costs[name] = save(batch, other)
            self._remove(batch, other)
        batch.seal()
        self._store.first.put(batch.keys, batch.slots)
        costs["copy down"] = _cost_of(lambda: self._copy_down(batch))
        self._store.lower[0].store.remove(batch.keys)
        costs["copy beside a loop"] = self._copy_beside(batch)
        costs["get above"] = _cost_of(lambda: self._get(batch))
        self._store.first.remove(batch.keys)
        _forget(self._files)
        costs["get below"] = _cost_of(lambda: self._get(batch))
        costs["promote"] = _cost_of(lambda: self._promote(batch))
        self._remove(batch)
        return costs

    def _save(self, batch: Batch, other: Batch) -> Cost:
        def save() -> None:
            batch.seal()
            assert self._store.first.put(batch.keys, batch.slots) == self._count

        return _cost_of(save)

    def _save_beside(self, batch: Batch, other: Batch) -> Cost:
        other.seal()
        self._store.put(other.keys, other.slots)
        cost = self._save(batch, other)
        self._flush()
        return cost

    def _copy_down(self, batch: Batch) -> None:
        self._store.copy_down(batch.keys, batch.sizes)
        self._flush()

    def _copy_beside(self, batch: Batch) -> Cost:
        with Loop() as alone:
            time.sleep(_LOOP_S)
            rate = alone.rate
        with Loop() as loop:
            cost = _cost_of(lambda: self._copy_down(batch))
            return cost._replace(loop_share=loop.rate / rate)

    def _flush(self) -> None:
        if not self._store.flush(_FLUSH_S):
            raise ConfigError(
                f"{self._files}: too slow for {self.num_bytes / 1e9:.1f} GB at a time"
            )

    def _get(self, batch: Batch) -> None:
        if self._store.get(batch.keys, batch.slots) < self._count:
            raise ConfigError(f"{self._files}: not all that was copied is there")

    def _promote(self, batch: Batch) -> None:
        promotes = self._store.optional(Promotes)
        assert promotes is not None
        promotes.promote(batch.keys, batch.slots)
        if self._store.first.match(batch.keys) < self._count:
            raise ConfigError(f"{self._files}: not all that was read there was promoted")

    def _remove(self, *batches: Batch) -> None:
        """Removes values everywhere, and waits for a disk that needs longer than a removal may."""
        for batch in batches:
            self._store.remove(batch.keys)
            until = time.monotonic() + _FLUSH_S
            while any(tier.is_out for tier in self._store.lower) and time.monotonic() < until:
                time.sleep(0.05)

    def _batch(self, number: int) -> Batch:
        first = number * self._count
        slots = Slots(
            self._memory, self._size, range(first, first + self._count), [self._size] * self._count
        )
        payload = self._size - block.HEADER_BYTES
        names = (secrets.token_bytes(16) for _ in range(self._count))
        headers = [block.Header(0, 0, 0, 1, 64, payload, _NAMESPACE, name) for name in names]
        return Batch(slots, headers)


def _cost_of(way: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def _forget(directory: Path) -> None:
    """Drops files from the page cache."""
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(arena: Path, directory: Path, rounds: int, size: int, count: int) -> Report:
    """Measures each stack in turn. Raises ConfigError, for a directory without direct files too."""
    report = Report(
        f"{rounds} rounds of {count} values of {size >> 20} MiB: median and range", COLUMNS
    )
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        benches = {}
        for name, option in (("file", ""), ("file, direct=1", "&direct=1")):
            files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            room = 3 * size * count + (64 << 20)
            url = f"shm://copies-{secrets.token_hex(4)}?size={room}&dir={arena}"
            text = f"{url} file://{files}/below?budget={2 * room}&{_RATE}{option}"
            store = TieredStore.open(StoreURL.of(text), read_settings(store=text))
            stack.callback(store.close)
            benches[name] = Bench(store, files, size, count)
        for number in range(rounds + 1):  # the first warms up
            for name, bench in benches.items():
                for way, cost in bench.turn(number % 2 == 1).items():
                    costs[name, way] += [cost] if number else []
    gb = size * count / 1e9
    for (name, way), of_way in costs.items():
        rates = [gb / cost.wall_s for cost in of_way]
        cpu = [cost.cpu_s / gb for cost in of_way]
        shares = [cost.loop_share for cost in of_way if cost.loop_share is not None]
        share = round(median(shares), 3) if shares else ""
        report.add(name, way, *_middle(rates), *_middle(cpu), share)
    return report


def _middle(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in (median(values), min(values), max(values))]


def main() -> None:
    parser = parser_of(__doc__, rounds=9)
    add = parser.add_argument
    add("--directory", type=Path, default=Path(tempfile.gettempdir()), help="of the files")
    add("--arena", type=Path, default=Path("/dev/shm"), help="a directory in memory")
    add("--mib", type=int, default=4, help="of a value (%(default)s)")
    add("--values", type=int, default=64, help="of a save (%(default)s)")
    given = parser.parse_args()
    size = given.mib << 20
    run(lambda: measure(given.arena, given.directory, given.rounds, size, given.values), given.json)


if __name__ == "__main__":
    main()
