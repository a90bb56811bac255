"""put and get of a store with and without a seal key, side by side, and the cipher alone.

python -m benchmarks.seal [--store redis://localhost:6379/0] [--json FILE]
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.report import Report, seconds_of
from pdstore.format.envelope import ENVELOPE_BYTES, SEAL_KEY_BYTES, Envelopes
from pdstore.format.keys import BlockKey
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots, Store
from pdstore.store.seal import Encrypted
from pdstore.testing.values import run_together

_SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}
_THREADS = (1, 4)
_BYTES = 32 << 20  # of one call: what a worker moves at a time
_DEADLINE_S = 60.0


class _Way(NamedTuple):
    """One store, and for each thread its keys and the memory that it puts from and gets into."""

    store: Store
    calls: Sequence[tuple[Sequence[BlockKey], Slots]]

    def together(self, verb: str) -> float:
        """Returns the seconds of one call of each thread, all at once."""
        method = getattr(self.store, verb)
        calls = [partial(_checked, method, keys, slots) for keys, slots in self.calls]
        return seconds_of(lambda: run_together(*calls, deadline_s=_DEADLINE_S))

    def forget(self) -> None:
        for keys, _ in self.calls:
            self.store.remove(keys)


def bench_seal(urls: Sequence[str], directory: Path, rounds: int) -> Report:
    """Measures each store; in each round both ways take turns. Raises StoreError, ConfigError."""
    columns = ("store", "value", "threads", "verb", "plain", "sealed", "ratio")
    report = Report(f"GB/s of put and get, medians of {rounds} rounds in turn", columns)
    envelopes = Envelopes([secrets.token_bytes(SEAL_KEY_BYTES)])
    with tempfile.TemporaryDirectory(prefix="pdstore-bench-", dir=directory) as temporary:
        for url in urls or [f"file://{temporary}/store?budget=8GiB"]:
            store = open_store(url, read_settings(store=url))
            for name, size in _SIZES.items():
                for num_threads in _THREADS:
                    ways = [
                        _way(one, size, num_threads) for one in (store, Encrypted(store, envelopes))
                    ]
                    for verb, (plain, sealed) in _measure(ways, rounds).items():
                        rates = (_BYTES * num_threads / 1e9 / s for s in (plain, sealed))
                        cells = (store.label.partition(":")[0], name, num_threads, verb)
                        report.add(*cells, *rates, plain / sealed)
            store.close()
    report.notes.append(_cipher_alone(envelopes, rounds))
    return report


def _measure(ways: Sequence[_Way], rounds: int) -> dict[str, list[float]]:
    """Returns for each verb the median seconds of each way."""
    seconds: dict[str, list[list[float]]] = {verb: [[] for _ in ways] for verb in ("put", "get")}
    for turn in range(rounds + 1):  # the first warms up
        order = range(len(ways)) if turn % 2 else reversed(range(len(ways)))
        for number in order:
            for verb, series in seconds.items():
                took = ways[number].together(verb)
                if turn:
                    series[number].append(took)
            ways[number].forget()
    return {verb: [median(one) for one in series] for verb, series in seconds.items()}


def _way(store: Store, size: int, num_threads: int) -> _Way:
    count, slot_bytes = _BYTES // size, -(-size // 4096) * 4096
    calls = []
    for _ in range(num_threads):
        view = store.allocate(slot_bytes * count)
        view[:] = secrets.token_bytes(len(view))
        keys = [BlockKey(f"pds1:bench:{secrets.token_hex(16)}") for _ in range(count)]
        calls.append((keys, Slots(view, slot_bytes, range(count), [size] * count)))
    return _Way(store, calls)


def _checked(
    method: Callable[[Sequence[BlockKey], Slots], int], keys: Sequence[BlockKey], slots: Slots
) -> None:
    assert method(keys, slots) == len(keys)


def _cipher_alone(envelopes: Envelopes, rounds: int) -> str:
    size, key = _SIZES["8 MiB"], BlockKey("pds1:bench:cipher")
    value, envelope = (memoryview(bytearray(n)) for n in (size, size + ENVELOPE_BYTES))
    calls = (
        lambda: envelopes.encrypt(key, value, envelope),
        lambda: envelopes.decrypt(key, envelope, value),
    )
    rates = [size / 1e9 / median(seconds_of(call) for _ in range(rounds)) for call in calls]
    return "the cipher alone, one thread: {:.1f} GB/s to encrypt, {:.1f} to decrypt".format(*rates)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="URL",
        help="a store to measure, again for more (default: a new file store in /dev/shm)",
    )
    given = parser.parse_args()
    directory = Path("/dev/shm")
    run(lambda: bench_seal(given.store, directory, given.rounds), given.json)


if __name__ == "__main__":
    main()
